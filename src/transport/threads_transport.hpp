#pragma once
// One rank of threads::run, and what its ranks share. A message is a pointer to the sender's memory
// in the receiver's mailbox; the receiver copies it once, straight into the buffer it posted,
// outside every lock. Small metadata and control messages are copied by their sender instead, so
// that it is done with them at once.
// With a link rate the messages are booked on a model of the links (link_model.hpp): visible when
// such a link would have delivered them, `sent` no earlier than it would have transmitted them.
// Ranks that wait spin, then yield, then sleep until something they look for rings (doorbell.hpp).

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "ferry/transport.hpp"
#include "transport/abort_text.hpp"
#include "transport/doorbell.hpp"
#include "transport/fence.hpp"
#include "transport/inbox.hpp"
#include "transport/link_model.hpp"
#include "transport/regions.hpp"

namespace ferry::detail {

/// Messages that arrived for one rank since it last looked.
struct Mailbox {
  std::mutex mutex;
  std::vector<MessagePtr> arrived;
  alignas(64) std::atomic<std::uint64_t> num_arrived{0};
};

/// Shared by all ranks; owns node memory and messages until the last rank has left, because one may
/// leave while another still reads from it.
struct ThreadsWorld {
  /// `link_bits_per_s` 0 = as fast as memory.
  ThreadsWorld(const Topology& shape, double link_bits_per_s);
  /// Some ranks of another world, on its links.
  ThreadsWorld(const ThreadsWorld& whole, const Topology& shape, const std::vector<int>& ranks);

  /// Ends this world and the sub-groups made from it.
  void abort(const std::string& text);
  /// The world of a sub-group: each of its ranks gets the same one by its n-th call with that list.
  std::shared_ptr<ThreadsWorld> subgroup(const std::vector<int>& ranks, const Topology& shape,
                                         int asker);
  /// Takes the failure of `rank`; the first one is what run() throws.
  void fail(int rank, const std::exception_ptr& error);
  /// False where a thread has this rank already.
  bool take(int rank);
  /// Wakes a rank for a message, or for memory of a send that is its own again.
  void ring(int rank) {
    bells[topology.node_of(rank)]->ring(topology.local_index(rank), Doorbell::kMessageBit);
  }

  Topology topology;
  RegionTable regions;
  std::vector<Mailbox> mailboxes;                // by rank
  std::vector<std::unique_ptr<Doorbell>> bells;  // by node
  // Shared with the worlds of sub-groups; null = as fast as memory.
  std::shared_ptr<LinkModel> links;
  std::vector<int> link_ranks;  // by rank: which one it is on the links
  int spin_rounds;              // 0 when ranks have to share cores
  AbortText ended;
  std::mutex failure_mutex;
  std::exception_ptr failure;

 private:
  /// Sub-groups of one list of ranks: how many each rank has made, and those that not all of them
  /// have taken yet.
  struct Series {
    struct Open {
      std::shared_ptr<ThreadsWorld> world;
      std::size_t num_taken = 0;
    };
    std::map<int, int> num_made;  // by rank
    std::map<int, Open> open;     // by number
  };
  void make_bells();

  std::mutex taken_mutex_;
  std::vector<bool> taken_;
  std::mutex subgroups_mutex_;
  std::map<std::vector<int>, Series> series_;
  std::vector<std::weak_ptr<ThreadsWorld>> subgroups_;  // that may have to be ended
};

class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<ThreadsWorld> world, int rank)
      : Transport(rank, world->topology),
        world_of_all_(std::move(world)),
        world_(*world_of_all_),
        bell_(*world_.bells[node()]),
        place_(world_.topology.local_index(rank)),
        inbox_(world_.topology) {}

  ~ThreadsTransport() override {
    if (world_.ended.is_set()) {
      withdraw_sends();  // the attachment must not free memory that a peer still copies
    }
    attachment.reset();  // it may still call this object
    withdraw_sends();
  }

  std::string_view name() const override { return "threads"; }
  bool paced() const override { return world_.links != nullptr; }
  // A rank that shares its core may come late to refill a fast link; a longer queue bridges that.
  int preferred_sends_in_flight() const override { return paced() ? 8 : 4; }

  std::byte* create_region(std::uint64_t key, std::uint64_t bytes) override {
    std::byte* const memory = world_.regions.create(rank(), key, bytes);
    bell_.ring_all(Doorbell::kAll);
    return memory;
  }
  std::byte* map_region(int owner, std::uint64_t key) override {
    return world_.regions.map(rank(), owner, key);
  }
  void retire_region(std::uint64_t key) override { world_.regions.retire(rank(), key); }
  std::shared_ptr<const void> hold_region(std::uint64_t key) override {
    return world_.regions.hold(rank(), key);
  }

  void raise_flag(std::atomic<std::uint64_t>& flag, std::uint64_t value) override {
    store_fence();
    flag.exchange(value);  // sequentially consistent: the bell is looked at after it
    bell_.ring_all(Doorbell::bit_of(&flag));
  }
  bool reached(const std::atomic<std::uint64_t>& flag, std::uint64_t value) override {
    if (flag.load(std::memory_order_acquire) >= value) {
      return true;
    }
    looked_for_ |= Doorbell::bit_of(&flag);
    return false;
  }

  bool sent(std::uint64_t ticket) override;
  void post_receive(int source, std::span<std::byte> buffer) override {
    inbox_.post(source, buffer);
  }
  std::vector<std::span<std::byte>> withdraw_receives(int source) override {
    return inbox_.withdraw(source);
  }
  std::optional<Received> poll_received() override;
  std::optional<Incoming> probe() override {
    fetch();
    return inbox_.empty() ? std::nullopt : inbox_.probe(time());
  }
  void accept(const Incoming& incoming, std::span<std::byte> buffer) override {
    inbox_.accept(incoming, buffer);
  }

  WaitOutcome wait_until(Waiter& waiter) override {
    const struct Disarm {
      ThreadsTransport& transport;
      ~Disarm() { transport.disarm(); }
    } disarm_at_end{*this};
    return Transport::wait_until(waiter);
  }

  void abort(const std::string& text) override { world_.abort(text); }
  std::optional<std::string> aborted() const override { return world_.ended.get(); }

  /// Takes back what no receiver has copied. Ensures: nobody reads memory of this rank's sends.
  void withdraw_sends();

 protected:
  std::uint64_t start_send(int target, MessageKind kind, std::span<const std::byte> bytes) override;
  std::unique_ptr<Transport> make_subgroup(const std::vector<int>& ranks, const Topology& topology,
                                           double deadline_s) override;
  void rest(int round) override;

 private:
  /// What messages are compared with; without links all of them are due.
  double time() const { return paced() ? base::now_s() : 0; }
  void fetch();
  void disarm();
  double sleep_s(int sleeps) const;

  // Shared by all ranks.
  const std::shared_ptr<ThreadsWorld> world_of_all_;
  ThreadsWorld& world_;
  Doorbell& bell_;
  int place_;
  Inbox inbox_;
  std::uint64_t num_fetched_ = 0;
  std::vector<MessagePtr> fetched_;
  std::uint64_t next_ticket_ = 1;
  std::unordered_map<std::uint64_t, MessagePtr> sends_;  // by ticket, not yet reported as sent
  bool armed_ = false;
  std::uint64_t looked_for_ = 0;  // flags that were not reached, as bits of the bell
};

}  // namespace ferry::detail
