// Booking of transmission times; the model is described in link_model.hpp.

#include "transport/link_model.hpp"

#include <algorithm>
#include <utility>

namespace ferry::detail {

namespace {
constexpr std::uint64_t kControlBelowBytes = 2048;
}  // namespace

LinkModel::LinkModel(Topology topology, double bits_per_s)
    : topology_(std::move(topology)),
      bits_per_s_(bits_per_s),
      egress_free_s_(topology_.num_nodes(), 0.0),
      ingress_free_s_(topology_.num_nodes(), 0.0),
      rank_left_s_(topology_.num_ranks(), 0.0) {}

LinkTimes LinkModel::transmit(const LinkMessage& message, double now_s) {
  const double duration = 8.0 * static_cast<double>(message.bytes) / bits_per_s_;
  const bool control = message.kind != MessageKind::payload && message.bytes < kControlBelowBytes;
  const std::lock_guard lock(mutex_);
  double& egress_free = egress_free_s_[topology_.node_of(message.source)];
  double& ingress_free = ingress_free_s_[topology_.node_of(message.target)];
  double& rank_left = rank_left_s_[message.source];
  LinkTimes times;
  if (control) {
    times.left_s = std::max(now_s, rank_left) + duration;
    times.here_s = times.left_s;
    egress_free = std::max(now_s, egress_free) + duration;
    ingress_free = std::max(now_s, ingress_free) + duration;
  } else {
    times.left_s = std::max(now_s, egress_free) + duration;
    times.here_s = std::max(times.left_s - duration, ingress_free) + duration;
    egress_free = times.left_s;
    ingress_free = times.here_s;
  }
  rank_left = std::max(rank_left, times.left_s);
  return times;
}

}  // namespace ferry::detail
