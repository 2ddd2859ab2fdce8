// What all transports share: counting, flags, kernels between their hooks, and the wait loop with
// its deadlines. The clock is read only after a poll that found nothing to do.

#include "ferry/transport.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/clock.hpp"
#include "ferry/error.hpp"
#include "kernels/row_kernels.hpp"
#include "kernels/sparse_rows.hpp"
#include "transport/fence.hpp"
#include "transport/sole_use.hpp"

namespace ferry {

namespace {

// Ladder of Transport::rest: spins for answers that are on their way, then the core goes to whoever
// can use it, then sleeps that grow. Transports that can be woken have a ladder of their own.
constexpr int kSpinRounds = 20;
constexpr int kYieldRounds = 200;
constexpr int kPausesPerSpin = 16;
constexpr std::int64_t kFirstSleep_us = 50;
constexpr std::int64_t kLongestSleep_us = 1000;

// Often enough that a late one does not look like a missing one.
constexpr double kSignsOfLifePerLimit = 5;

constexpr double kWaitCheck_s = 0.05;

/// The two limits of a waiter. Times are taken at idle polls, so a wait that never rests reads no
/// clock; a limit is then counted from the first idle poll.
class Deadlines {
 public:
  explicit Deadlines(Waiter& waiter) : waiter_(waiter) {}

  void advanced() { advanced_ = true; }

  /// To be asked after a poll that found nothing to do, at time `now`.
  bool passed(double now) {
    const std::uint64_t life = waiter_.life_sign();
    if (!started_ || life != life_) {
      life_ = life;
      quiet_since_ = now;
    }
    if (!started_ || advanced_) {
      stuck_since_ = now;
    }
    if (!started_) shown_at_ = now;
    if (now - shown_at_ > waiter_.quiet_limit_s() / kSignsOfLifePerLimit) {
      waiter_.show_life();
      shown_at_ = now;
    }
    started_ = true;
    advanced_ = false;
    return now - quiet_since_ > waiter_.quiet_limit_s() ||
           now - stuck_since_ > waiter_.stuck_limit_s();
  }

 private:
  Waiter& waiter_;
  bool started_ = false;
  bool advanced_ = false;
  std::uint64_t life_ = 0;
  double quiet_since_ = 0;
  double shown_at_ = 0;
  double stuck_since_ = 0;
};

/// Runs `close` at the end of a scope, also when an exception leaves it.
template <typename Close>
class AtEnd {
 public:
  explicit AtEnd(Close close) : close_(std::move(close)) {}
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;
  ~AtEnd() { close_(); }

 private:
  Close close_;
};

void check_target(const Transport& transport, int target, std::uint64_t bytes) {
  const Topology& topology = transport.topology();
  if (target < 0 || target >= topology.num_ranks()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("send: target {} of a message of {} bytes from rank {} is no rank; "
                            "allowed: 0..{}; fix: pass a rank of the transport's topology",
                            target, bytes, transport.rank(), topology.num_ranks() - 1));
  }
  if (topology.same_node(target, transport.rank())) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("send: target {} of a message of {} bytes is on node {} like its sender "
                    "rank {}; allowed: ranks of other nodes; fix: use node memory and flags "
                    "inside a node",
                    target, bytes, transport.node(), transport.rank()));
  }
}

/// What is wrong with the ranks of a sub-group.
std::optional<std::string> find_subgroup_error(const Transport& transport,
                                               const std::vector<int>& ranks) {
  const int num_ranks = transport.topology().num_ranks();
  std::vector<bool> taken(static_cast<std::size_t>(num_ranks), false);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] >= num_ranks) {
      return fmt::format("ranks[{}] = {}; allowed: 0..{}; fix: name ranks of this group", i,
                         ranks[i], num_ranks - 1);
    }
    if (taken[static_cast<std::size_t>(ranks[i])]) {
      return fmt::format("rank {} stands there twice; fix: name each rank once", ranks[i]);
    }
    taken[static_cast<std::size_t>(ranks[i])] = true;
  }
  if (taken[static_cast<std::size_t>(transport.rank())]) return std::nullopt;
  return fmt::format("rank {} is not among [{}]; fix: call it on the ranks of the list alone",
                     transport.rank(), fmt::join(ranks, ", "));
}

/// The nodes and sockets that some ranks of a topology have, numbered without gaps.
Topology part_of(const Topology& whole, const std::vector<int>& ranks) {
  std::vector<int> new_node(static_cast<std::size_t>(whole.num_nodes()), -1);
  for (const int rank : ranks) new_node[static_cast<std::size_t>(whole.node_of(rank))] = 0;
  int num_nodes = 0;
  for (int& node : new_node) {
    if (node == 0) node = num_nodes++;
  }
  std::vector<int> nodes;
  std::vector<int> sockets;
  for (const int rank : ranks) {
    nodes.push_back(new_node[static_cast<std::size_t>(whole.node_of(rank))]);
    sockets.push_back(whole.socket_of(rank));
  }
  return Topology::from_map(nodes, sockets);
}

}  // namespace

Transport::Transport(int rank, Topology topology)
    : rank_(rank), topology_(std::move(topology)), sole_use_(std::make_shared<detail::SoleUse>()) {}

Transport::~Transport() = default;

TrafficCounters Transport::counters() const {
  const detail::UseHold hold(sole_use_);
  return counters_;
}

void Transport::check_caller() const {
  if (!sole_use_->is_forked()) return;
  throw Error(ErrorCode::peer_failed,
              fmt::format("this process was forked from rank {} and is no rank itself; fix: make "
                          "the calls in the parent",
                          rank_));
}

void Transport::raise_flag(std::atomic<std::uint64_t>& flag, std::uint64_t value) {
  detail::store_fence();
  flag.store(value, std::memory_order_release);
}

bool Transport::reached(const std::atomic<std::uint64_t>& flag, std::uint64_t value) {
  return flag.load(std::memory_order_acquire) >= value;
}

std::uint64_t Transport::send(int target, MessageKind kind, std::span<const std::byte> bytes) {
  check_target(*this, target, bytes.size());
  const std::uint64_t ticket = start_send(target, kind, bytes);
  switch (kind) {
    case MessageKind::payload: counters_.payload_bytes += bytes.size(); break;
    case MessageKind::metadata: counters_.metadata_bytes += bytes.size(); break;
    case MessageKind::control: counters_.control_bytes += bytes.size(); break;
  }
  ++counters_.messages;
  return ticket;
}

std::unique_ptr<Transport> Transport::subgroup(const std::vector<int>& ranks, double deadline_s) {
  check_caller();
  const detail::UseHold hold(sole_use_);
  if (const auto problem = find_subgroup_error(*this, ranks)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("subgroup: on rank {}: {}", rank_, *problem));
  }
  return make_subgroup(ranks, part_of(topology_, ranks), deadline_s);
}

std::unique_ptr<Transport> Transport::make_subgroup(const std::vector<int>& /*ranks*/,
                                                    const Topology& /*topology*/,
                                                    double /*deadline_s*/) {
  throw Error(ErrorCode::unsupported,
              fmt::format("subgroup: transport {} has none; fix: use ranks that are threads, or "
                          "processes under MPI",
                          name()));
}

void Transport::push_rows(const kernels::PushJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  kernels::push_rows(job);
}

void Transport::pack_rows(const kernels::PackJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  kernels::pack_rows(job);
}

kernels::PackedRows Transport::pack_rows_within(const kernels::PackWithinJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  return kernels::pack_rows_within(job);
}

bool Transport::find_marked_rows(const kernels::MarkedRowsJob& job,
                                 std::vector<kernels::MarkedRow>& rows) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  return kernels::find_marked_rows(job, rows);
}

kernels::SparseCounts Transport::keep_largest(const kernels::KeepLargestJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  return kernels::keep_largest(job);
}

std::uint64_t Transport::compress_rows(const kernels::CompressJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  return kernels::compress_rows(job);
}

bool Transport::expand_rows(const kernels::ExpandJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  return kernels::expand_rows(job);
}

void Transport::sum_rows(const kernels::SumJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  kernels::sum_rows(job);
}

void Transport::scale_rows(const kernels::ScaleJob& job) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  kernels::scale_rows(job);
}

std::uint32_t Transport::checksum(std::span<const std::byte> payload) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  return kernels::crc32c(payload);
}

void Transport::fill(std::span<std::byte> payload, unsigned char value) {
  begin_kernel();
  const AtEnd close([this] { end_kernel(); });
  std::memset(payload.data(), value, payload.size());
}

double Transport::now_s() const { return base::now_s(); }

WaitOutcome Transport::wait_until(Waiter& waiter) {
  Deadlines deadlines(waiter);
  double checked_at = 0;
  int round = 0;
  while (true) {
    // Taken before the poll: the waiter gets one poll to end its own way once the job is aborted.
    const std::optional<std::string> ended = aborted();
    switch (waiter.poll()) {
      case Progress::done: return WaitOutcome::done;
      case Progress::advanced:
        round = 0;
        deadlines.advanced();
        break;
      case Progress::idle: {
        if (ended) {
          throw Error(ErrorCode::peer_failed, *ended);
        }
        const double now = base::now_s();
        if (deadlines.passed(now)) {
          return WaitOutcome::timed_out;
        }
        if (wait_check_ && now - checked_at > kWaitCheck_s) {
          checked_at = now;
          wait_check_();
        }
        rest(round);
        round = std::min(round + 1, std::numeric_limits<int>::max() - 1);
        break;
      }
    }
  }
}

void Transport::rest(int round) {
  if (round < kSpinRounds) {
    for (int i = 0; i < kPausesPerSpin; ++i) {
      detail::spin_pause();
    }
    return;
  }
  if (round < kYieldRounds) {
    std::this_thread::yield();
    return;
  }
  const std::int64_t sleep_us =
      std::min<std::int64_t>(kFirstSleep_us * (1 + (round - kYieldRounds) / 8), kLongestSleep_us);
  std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
}

}  // namespace ferry
