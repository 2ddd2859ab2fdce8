#pragma once
// One rank that is a process of an MPI job. Inside its node everything goes through shared memory
// (shared_regions.hpp); between nodes each message of Transport is one MPI message.
//
// Invariants: of each source only the oldest posted receive is asked for, so payload is reported
//             in the order it was sent. Metadata, control and the end of the job share one
//             communicator, so one matched probe finds the oldest of them.
//             After MPI_Finalize, or in a forked child, nothing calls MPI.

#include <mpi.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ferry/transport.hpp"
#include "transport/mpi/look_turns.hpp"
#include "transport/mpi/mpi_comm.hpp"
#include "transport/mpi/mpi_end.hpp"
#include "transport/mpi/mpi_sends.hpp"
#include "transport/mpi/mpi_subgroup.hpp"
#include "transport/shared_regions.hpp"

namespace ferry::detail {

class MpiTransport final : public Transport, private MpiEndListener {
 public:
  MpiTransport(std::shared_ptr<CommPairs> pairs, const CommPair& pair, Topology topology,
               NodeLinks links, std::vector<std::string> hosts);
  ~MpiTransport() override;

  std::string_view name() const override { return "mpi"; }

  std::byte* create_region(std::uint64_t key, std::uint64_t bytes) override {
    return regions_.create(key, bytes);
  }
  std::byte* map_region(int owner, std::uint64_t key) override;
  void retire_region(std::uint64_t key) override { regions_.retire(key); }
  std::shared_ptr<const void> hold_region(std::uint64_t key) override { return regions_.hold(key); }

  bool sent(std::uint64_t ticket) override;
  void post_receive(int source, std::span<std::byte> buffer) override;
  std::vector<std::span<std::byte>> withdraw_receives(int source) override;
  std::optional<Received> poll_received() override;
  std::optional<Incoming> probe() override;
  void accept(const Incoming& incoming, std::span<std::byte> buffer) override;

  /// Looks for the end of the job that a rank of another node has told.
  void poll_abort();

  WaitOutcome wait_until(Waiter& waiter) override;
  void abort(const std::string& text) override;
  std::optional<std::string> aborted() const override;
  std::string host_of(int rank) const override { return hosts_.at(static_cast<std::size_t>(rank)); }
  void check_caller() const override;
  void check_progress_thread() const override;

 protected:
  std::uint64_t start_send(int target, MessageKind kind, std::span<const std::byte> bytes) override;
  std::unique_ptr<Transport> make_subgroup(const std::vector<int>& ranks, const Topology& topology,
                                           double deadline_s) override;
  void rest(int round) override;

 private:
  struct Posted {
    MPI_Request request = MPI_REQUEST_NULL;
    std::span<std::byte> buffer;
  };
  struct Lane {
    int source = -1;
    std::deque<Posted> posted;
  };
  struct Probed {
    MPI_Message message = MPI_MESSAGE_NULL;
    int source = -1;
    MessageKind kind = MessageKind::control;
    std::uint64_t bytes = 0;
  };
  struct Accepted {
    Probed probed;
    MPI_Request request = MPI_REQUEST_NULL;
    std::span<std::byte> buffer;
  };

  void mpi_ends() noexcept override;
  /// Nothing calls MPI afterwards. What MPI may still write to or read from stays allocated.
  void close_mpi();
  bool finish_accepted(double limit_s);
  bool finish_dropped();
  /// Errors: peer_failed, once MPI has ended and in a forked child
  void require_mpi(std::string_view call) const;
  int tag_of(MessageKind kind) const { return pair_.first_tag + static_cast<int>(kind); }
  int abort_tag() const { return pair_.first_tag + CommPairs::kTags - 1; }
  std::size_t lane_of(int source);
  std::optional<Received> take_accepted();
  Received take_head(std::size_t lane);
  void drop(MPI_Message message, std::uint64_t bytes);
  void take_abort(MPI_Message message, std::uint64_t bytes);
  void note_truncated(int at);

  // Shared with the communicator that the program gave, which may be freed earlier.
  std::shared_ptr<CommPairs> pairs_;
  CommPair pair_;
  SharedRegions regions_;
  std::vector<std::string> hosts_;  ///< by rank
  const bool main_thread_only_;     ///< MPI provides no more than MPI_THREAD_FUNNELED
  bool open_ = true;
  int spin_rounds_;
  LookTurns looks_;
  SubgroupComms subgroup_comms_;
  MpiTransport* whole_ = nullptr;  ///< of a sub-group, which goes first; its end is ours, too

  std::uint64_t next_ticket_ = 1;
  MpiSends sends_;
  std::vector<Lane> lanes_;          // sources that a receive was ever posted for
  std::vector<MPI_Request> heads_;   // by lane: its oldest receive, or null
  std::vector<int> lane_of_source_;  // -1 = none yet
  std::uint64_t next_id_ = 1;
  std::unordered_map<std::uint64_t, Probed> probed_;
  std::deque<Accepted> accepted_;
  std::deque<Received> truncated_;
  /// Messages that nobody wants; MPI may still write to their memory.
  struct Dropped {
    MPI_Request request = MPI_REQUEST_NULL;
    std::vector<std::byte> memory;
  };
  std::deque<Dropped> dropped_;
};

}  // namespace ferry::detail
