#pragma once
// What the exchange needs from the machine: memory shared inside a node, messages between nodes,
// flags, and kernels that touch payload. One object per rank.
//
// Rules every implementation keeps (tests/transport runs one suite over all of them):
//   1. No call but wait_until blocks; a call that cannot finish now says so and is asked again.
//   2. Payload messages of one (source, target) pair arrive in the order they were sent, and so do
//      metadata and control messages; nothing is promised between the two kinds.
//   3. A region lives until its owner retires it, and its memory in the owner's process as long as
//      somebody holds it; only ranks of the owner's node can map it.
//   4. Payload memory is touched only inside the kernel calls below.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/topology.hpp"

namespace ferry {

namespace detail {
class SoleUse;
}
namespace kernels {
struct PushJob;
struct PackJob;
struct PackWithinJob;
struct PackedRows;
struct MarkedRowsJob;
struct MarkedRow;
struct KeepLargestJob;
struct CompressJob;
struct SparseCounts;
struct ExpandJob;
struct SumJob;
struct ScaleJob;
}  // namespace kernels

/// What a message carries; bytes are counted apart for each.
enum class MessageKind : std::uint8_t { payload = 0, metadata = 1, control = 2 };

/// Bytes and messages that this rank handed to the network, by kind. Between nodes only.
struct TrafficCounters {
  std::uint64_t payload_bytes = 0;  ///< fragments, headers included
  std::uint64_t metadata_bytes = 0;
  std::uint64_t control_bytes = 0;  ///< grants, poison, barriers
  std::uint64_t messages = 0;
};

/// A posted payload receive, or an accepted message, whose bytes are now in `buffer`.
struct Received {
  int source = -1;
  MessageKind kind = MessageKind::payload;
  std::span<std::byte> buffer;  ///< as posted or accepted; only the first `bytes` were written
  std::uint64_t bytes = 0;      ///< length of the message
  /// The message was longer than the buffer: its bytes are lost, and `bytes` is its length or, as
  /// MPI does not tell that, only more than the buffer holds.
  bool truncated = false;
};

/// A metadata or control message that has arrived and waits for memory.
struct Incoming {
  int source = -1;
  MessageKind kind = MessageKind::control;
  std::uint64_t bytes = 0;
  std::uint64_t id = 0;
};

enum class Progress : std::uint8_t { idle, advanced, done };

/// What Transport::wait_until drives.
class Waiter {
 public:
  virtual ~Waiter() = default;
  /// One round of work; `done` ends the wait.
  virtual Progress poll() = 0;
  /// A number that changes with every sign of life of what is waited for.
  virtual std::uint64_t life_sign() = 0;
  /// Called a few times within quiet_limit_s: tells those who may wait for this rank that it lives.
  virtual void show_life() {}
  /// Longest time without a change of life_sign, and with changes but without `advanced`.
  virtual double quiet_limit_s() const = 0;
  virtual double stuck_limit_s() const = 0;
};

enum class WaitOutcome : std::uint8_t { done, timed_out };

/// Base of what the exchange keeps with a transport (its operations, windows and credit).
class TransportAttachment {
 public:
  virtual ~TransportAttachment() = default;
  /// One round of work for a progress thread; `done`: no round is needed.
  virtual Progress work() noexcept { return Progress::done; }
};

class Transport {
 public:
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport();

  int rank() const { return rank_; }
  const Topology& topology() const { return topology_; }
  int node() const { return topology_.node_of(rank_); }
  virtual std::string_view name() const = 0;
  /// True when links are slowed to a stated rate.
  virtual bool paced() const { return false; }
  /// Fragment size, header included, that keeps a link full.
  virtual std::uint64_t preferred_fragment_bytes() const { return 60 * 1024; }
  /// Sends of one rank that keep a link full.
  virtual int preferred_sends_in_flight() const { return 8; }

  // Node memory -----------------------------------------------------------------------------------
  /// Zero-filled memory, page-aligned, that ranks of this node can map by (rank(), key).
  /// Errors: resource_exhausted, with the size.
  virtual std::byte* create_region(std::uint64_t key, std::uint64_t bytes) = 0;
  /// Says that only kernels touch a region of this rank from this byte on, so that it may lie where
  /// the host cannot reach. Requires: page-aligned
  virtual void mark_payload(std::uint64_t /*key*/, std::uint64_t /*from*/) {}
  /// Address of a region here; null while its owner has not created it yet.
  /// Errors: invalid_argument when the owner is on another node.
  virtual std::byte* map_region(int owner, std::uint64_t key) = 0;
  /// Gives a region of this rank back. Requires: no rank touches it any more.
  virtual void retire_region(std::uint64_t key) = 0;
  /// Keeps the memory of a region of this rank mapped here while the result lives, also when the
  /// region was retired or the transport is gone. May be dropped on any thread.
  /// Errors: invalid_argument when there is no such region.
  virtual std::shared_ptr<const void> hold_region(std::uint64_t key) = 0;

  // Flags (in node memory) ------------------------------------------------------------------------
  /// Publishes `value`, and before it every earlier write of this rank, streaming stores included.
  virtual void raise_flag(std::atomic<std::uint64_t>& flag, std::uint64_t value);
  /// True once the flag is at least `value`; what was written before it was raised is then visible.
  virtual bool reached(const std::atomic<std::uint64_t>& flag, std::uint64_t value);

  // Messages between nodes ------------------------------------------------------------------------
  /// Hands a message to the network. `bytes` stays untouched until sent(ticket) is true.
  std::uint64_t send(int target, MessageKind kind, std::span<const std::byte> bytes);
  /// True once the memory of a send is the caller's again; ask no more after that.
  virtual bool sent(std::uint64_t ticket) = 0;
  /// Gives memory for one payload message from `source`. Buffers of one source fill in order.
  virtual void post_receive(int source, std::span<std::byte> buffer) = 0;
  /// Takes back, in order, the posted buffers of a source that no message has filled yet.
  virtual std::vector<std::span<std::byte>> withdraw_receives(int source) = 0;
  /// The next completed receive of any source, if there is one.
  virtual std::optional<Received> poll_received() = 0;
  /// The next metadata or control message that has arrived and was not probed before.
  virtual std::optional<Incoming> probe() = 0;
  /// Gives memory (at least incoming.bytes) for a probed message; poll_received reports it.
  virtual void accept(const Incoming& incoming, std::span<std::byte> buffer) = 0;

  // Payload kernels -------------------------------------------------------------------------------
  void push_rows(const kernels::PushJob& job);
  void pack_rows(const kernels::PackJob& job);
  kernels::PackedRows pack_rows_within(const kernels::PackWithinJob& job);
  bool find_marked_rows(const kernels::MarkedRowsJob& job, std::vector<kernels::MarkedRow>& rows);
  kernels::SparseCounts keep_largest(const kernels::KeepLargestJob& job);
  std::uint64_t compress_rows(const kernels::CompressJob& job);
  bool expand_rows(const kernels::ExpandJob& job);
  void sum_rows(const kernels::SumJob& job);
  void scale_rows(const kernels::ScaleJob& job);
  std::uint32_t checksum(std::span<const std::byte> payload);
  void fill(std::span<std::byte> payload, unsigned char value);

  // Waiting ---------------------------------------------------------------------------------------
  /// Seconds on a clock that never goes back, for what is measured; the origin means nothing.
  virtual double now_s() const;
  /// Polls until done or until a limit of the waiter passes; yields the core in between.
  virtual WaitOutcome wait_until(Waiter& waiter);
  /// Asks `check` about twenty times a second while a wait finds nothing to do; what it throws ends
  /// the wait. For hosts whose signals are seen only when they are asked for. Null = nothing.
  void set_wait_check(std::function<void()> check) { wait_check_ = std::move(check); }

  // Sub-groups ------------------------------------------------------------------------------------
  /// The transport of this rank in a group of some of the ranks: `ranks[i]` is its rank i, on the
  /// nodes that they have here. Collective over `ranks` alone; several groups may overlap.
  /// Requires: their ranks make the same groups in the same order; goes before this transport
  ///           Each group moves its own operations: a wait on one does nothing for those of others,
  ///           unless they have a ProgressThread
  /// Errors:   invalid_argument (no rank of this group, twice the same, or this one is not in it),
  ///           timeout (a rank did not come), peer_failed, unsupported (the transport has none)
  std::unique_ptr<Transport> subgroup(const std::vector<int>& ranks, double deadline_s = 300);

  // Failure ---------------------------------------------------------------------------------------
  /// Ends the job of all ranks: every wait on every rank fails with `text`.
  virtual void abort(const std::string& text) = 0;
  /// The text of the first abort, once there is one.
  virtual std::optional<std::string> aborted() const = 0;

  /// Name of the machine that a rank runs on, for texts; empty where all ranks share one process.
  virtual std::string host_of(int /*rank*/) const { return {}; }

  TrafficCounters counters() const;

  /// Held by the thread that works on the transport.
  const std::shared_ptr<detail::SoleUse>& sole_use() const { return sole_use_; }
  /// Asked when a call begins. Errors: wrong_thread; peer_failed in a forked child
  virtual void check_caller() const;
  /// Errors: unsupported, where a second thread may not work on it
  virtual void check_progress_thread() const {}

  /// Kept by the exchange; destroyed before the transport.
  std::unique_ptr<TransportAttachment> attachment;

 protected:
  Transport(int rank, Topology topology);

  virtual std::uint64_t start_send(int target, MessageKind kind,
                                   std::span<const std::byte> bytes) = 0;
  /// subgroup(), once its arguments are checked; `topology` is that of the new group.
  virtual std::unique_ptr<Transport> make_subgroup(const std::vector<int>& ranks,
                                                   const Topology& topology, double deadline_s);
  /// Called around every kernel, so that a test can open payload memory only here.
  virtual void begin_kernel() {}
  virtual void end_kernel() {}
  /// Rests between two polls that found nothing to do; `round` counts them from 0.
  virtual void rest(int round);

 private:
  int rank_;
  Topology topology_;
  TrafficCounters counters_;
  std::function<void()> wait_check_;
  // Shared with what was made with the transport, which may be dropped later.
  std::shared_ptr<detail::SoleUse> sole_use_;
};

}  // namespace ferry
