#pragma once
// When a link of a stated rate would have delivered a message. Pure arithmetic on times.
//
// Each node has one full-duplex link that its ranks share. With d = bits / rate:
//   bulk     leaves after all that its node has queued:     left = max(now, egress_free) + d
//            and arrives after all that its target node has: here = max(left - d, ingress_free) + d
//   control  (metadata or control below 2 KiB) queues only behind what its own rank has in flight:
//            here = left = max(now, last `left` of the rank) + d. Real links share fairly between
//            connections, so a grant of an idle rank does not wait behind megabytes of its
//            neighbours. Its bits still count: bulk that is queued later leaves d later.
// So the bulk of a node never exceeds its rate, and an idle link costs a message only its own d.
// There is no latency besides d. Safe to call from any thread.

#include <cstdint>
#include <mutex>
#include <vector>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::detail {

/// What goes over the link.
struct LinkMessage {
  int source = 0;
  int target = 0;
  MessageKind kind = MessageKind::payload;
  std::uint64_t bytes = 0;
};

struct LinkTimes {
  double left_s = 0;  ///< the sender's link has transmitted it
  double here_s = 0;  ///< the receiver can see it
};

class LinkModel {
 public:
  LinkModel(Topology topology, double bits_per_s);

  /// Books the message at time `now_s`. Calls of one rank come in the order of their times.
  LinkTimes transmit(const LinkMessage& message, double now_s);

 private:
  Topology topology_;
  double bits_per_s_;
  std::mutex mutex_;
  std::vector<double> egress_free_s_;   // by node: bulk booked so far has left
  std::vector<double> ingress_free_s_;  // by node: bulk booked so far has arrived
  std::vector<double> rank_left_s_;     // by rank: its own messages have left
};

}  // namespace ferry::detail
