// Messages, waiting and the end of a rank under MPI; see mpi_transport.hpp.

#include "transport/mpi/mpi_transport.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/clock.hpp"
#include "base/keep_forever.hpp"
#include "ferry/error.hpp"
#include "ferry/mpi.hpp"
#include "transport/fence.hpp"
#include "transport/misuse.hpp"
#include "transport/sole_use.hpp"

namespace ferry::detail {

namespace {

// The ladder of rest(): answers that are on their way, then the core goes to the other ranks of
// the machine, then short sleeps. MPI moves nothing while a rank sleeps, so none is long against
// the time that a fragment takes on a link of 1 Gbit/s (about 0.5 ms).
constexpr int kSpinRounds = 20;
constexpr int kPausesPerSpin = 16;
constexpr int kYieldRounds = 400;
constexpr int kFirstSleep_us = 20;
constexpr int kLongestSleep_us = 200;
// probe() finds the end of the job too; this is for waits that probe for nothing.
constexpr int kRoundsPerAbortPoll = 32;

// How long the end of a transport waits for messages that are on their way.
constexpr double kFinishLimit_s = 5;
constexpr double kAbortedLimit_s = 0.1;

int thread_level() {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  return level;
}

bool ranks_have_cores(const Topology& topology, int node) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return false;
  return static_cast<int>(topology.ranks_of(node).size()) <= CPU_COUNT(&cores);
}

}  // namespace

MpiTransport::MpiTransport(std::shared_ptr<CommPairs> pairs, const CommPair& pair,
                           Topology topology, NodeLinks links, std::vector<std::string> hosts)
    : Transport(pair.rank, std::move(topology)),
      pairs_(std::move(pairs)),
      pair_(pair),
      regions_(pair.rank, std::move(links)),
      hosts_(std::move(hosts)),
      main_thread_only_(thread_level() < MPI_THREAD_SERIALIZED),
      spin_rounds_(ranks_have_cores(this->topology(), node()) ? kSpinRounds : 0),
      lane_of_source_(static_cast<std::size_t>(pair.size), -1) {}

MpiTransport::~MpiTransport() {
  if (sole_use()->is_forked()) {
    static_cast<void>(attachment.release());  // a forked child: the parent's peers are not its own
    return;
  }
  if (open_) {
    const double limit_s = aborted() ? kAbortedLimit_s : kFinishLimit_s;
    sends_.finish(limit_s);  // the exchange keeps what is still being sent
    if (!finish_accepted(limit_s)) {
      static_cast<void>(attachment.release());  // MPI may still write into memory that it gave
    }
  }
  attachment.reset();
  mpi_ends();
}

void MpiTransport::mpi_ends() noexcept {
  const UseHold hold(sole_use());
  try {
    close_mpi();
  } catch (const std::exception&) {
    // MPI is in no state to be asked: its pair is used no more, and its memory stays.
  }
  open_ = false;
}

bool MpiTransport::finish_accepted(double limit_s) {
  const double began = base::now_s();
  const auto is_done = [](Accepted& accepted) {
    int done = 0;
    return MPI_Test(&accepted.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
  };
  while (!std::ranges::all_of(accepted_, is_done)) {
    if (base::now_s() - began > limit_s) return false;
    std::this_thread::yield();
  }
  return true;
}

void MpiTransport::close_mpi() {
  if (!open_ || sole_use()->is_forked()) return;
  for (Lane& lane : lanes_) {
    if (!lane.posted.empty()) withdraw_receives(lane.source);
  }
  for (auto& [id, probed] : probed_) drop(probed.message, probed.bytes);
  probed_.clear();
  // What is here and has no reader any more, such as grants of a next use.
  while (const std::optional<Incoming> unread = probe()) {
    const Probed left = probed_.extract(unread->id).mapped();
    drop(left.message, left.bytes);
  }
  // A pair with live requests is never used again, and neither is what they work on.
  const bool idle =
      sends_.finish(kAbortedLimit_s) && finish_accepted(kAbortedLimit_s) && finish_dropped() &&
      std::ranges::all_of(lanes_, [](const Lane& lane) { return lane.posted.empty(); });
  open_ = false;
  if (idle) pairs_->give_back(pair_);
}

// Those that are not done stay for ever, with their memory.
bool MpiTransport::finish_dropped() {
  bool all_done = true;
  for (Dropped& dropped : dropped_) {
    int done = 0;
    if (MPI_Test(&dropped.request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0) continue;
    base::keep_forever(std::make_shared<std::vector<std::byte>>(std::move(dropped.memory)));
    all_done = false;
  }
  dropped_.clear();
  return all_done;
}

void MpiTransport::require_mpi(std::string_view call) const {
  if (open_ && !sole_use()->is_forked()) return;
  throw Error(
      ErrorCode::peer_failed,
      fmt::format("{}: {} on rank {}; fix: end the work with exchanges before", call,
                  open_ ? "this process was forked from the rank" : "MPI_Finalize was called",
                  rank()));
}

std::byte* MpiTransport::map_region(int owner, std::uint64_t key) {
  check_owner(topology(), rank(), owner, key);
  return regions_.map(owner, key);
}

std::uint64_t MpiTransport::start_send(int target, MessageKind kind,
                                       std::span<const std::byte> bytes) {
  require_mpi("send");
  const MPI_Comm comm = kind == MessageKind::payload ? pair_.payload : pair_.others;
  const MpiBytes length(bytes.size());
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(
      MPI_Isend(bytes.data(), length.count(), length.type(), target, tag_of(kind), comm, &request),
      "MPI_Isend");
  const std::uint64_t ticket = next_ticket_++;
  sends_.add(ticket, request);
  return ticket;
}

bool MpiTransport::sent(std::uint64_t ticket) {
  if (!open_) return false;  // MPI has ended, and nobody will ever know
  const std::optional<bool> done = sends_.is_done(ticket);
  if (!done) refuse_ticket(rank(), ticket);
  return *done;
}

std::size_t MpiTransport::lane_of(int source) {
  int& lane = lane_of_source_.at(static_cast<std::size_t>(source));
  if (lane < 0) {
    lane = static_cast<int>(lanes_.size());
    lanes_.push_back({.source = source, .posted = {}});
    heads_.push_back(MPI_REQUEST_NULL);
  }
  return static_cast<std::size_t>(lane);
}

void MpiTransport::post_receive(int source, std::span<std::byte> buffer) {
  require_mpi("post_receive");
  check_source(source, topology().num_ranks());
  const std::size_t lane = lane_of(source);
  const MpiBytes length(buffer.size());
  Posted posted{.buffer = buffer};
  check_mpi(MPI_Irecv(buffer.data(), length.count(), length.type(), source,
                      tag_of(MessageKind::payload), pair_.payload, &posted.request),
            "MPI_Irecv");
  lanes_[lane].posted.push_back(posted);
  if (lanes_[lane].posted.size() == 1) heads_[lane] = posted.request;
}

std::vector<std::span<std::byte>> MpiTransport::withdraw_receives(int source) {
  std::vector<std::span<std::byte>> withdrawn;
  const std::size_t at = lane_of(source);
  Lane& lane = lanes_[at];
  if (!open_) {  // MPI took them all back when it ended
    for (const Posted& posted : std::exchange(lane.posted, {})) withdrawn.push_back(posted.buffer);
    return withdrawn;
  }
  // The youngest first: a message that comes meanwhile then fills the oldest that is left.
  std::deque<Posted> kept;
  for (; !lane.posted.empty(); lane.posted.pop_back()) {
    Posted& posted = lane.posted.back();
    check_mpi(MPI_Cancel(&posted.request), "MPI_Cancel");
    int done = 0;
    int cancelled = 0;
    MPI_Status status;
    MPI_Request_get_status(posted.request, &done, &status);
    if (done != 0) MPI_Test_cancelled(&status, &cancelled);
    if (cancelled != 0) {
      MPI_Wait(&posted.request, MPI_STATUS_IGNORE);
      withdrawn.insert(withdrawn.begin(), posted.buffer);
    } else {
      kept.push_front(posted);  // a message has it: poll_received reports it
    }
  }
  lane.posted = std::move(kept);
  heads_[at] = lane.posted.empty() ? MPI_REQUEST_NULL : lane.posted.front().request;
  return withdrawn;
}

// Of each source the oldest: one that stands still must not hide what others say.
std::optional<Received> MpiTransport::take_accepted() {
  std::vector<int> waiting;
  for (auto at = accepted_.begin(); at != accepted_.end(); ++at) {
    if (std::ranges::find(waiting, at->probed.source) != waiting.end()) continue;
    int done = 0;
    check_mpi(MPI_Test(&at->request, &done, MPI_STATUS_IGNORE), "MPI_Test of a receive");
    if (done == 0) {
      waiting.push_back(at->probed.source);
      continue;
    }
    const Accepted taken = *at;
    accepted_.erase(at);
    return Received{.source = taken.probed.source,
                    .kind = taken.probed.kind,
                    .buffer = taken.buffer,
                    .bytes = taken.probed.bytes};
  }
  return std::nullopt;
}

std::optional<Received> MpiTransport::poll_received() {
  if (!open_) return std::nullopt;
  if (auto received = take_accepted()) return received;
  if (!truncated_.empty()) {
    const Received received = truncated_.front();
    truncated_.pop_front();
    return received;
  }
  const bool due = looks_.is_due(LookTurns::Look::payload, base::now_s());
  looks_.poll_ends();
  if (heads_.empty()) looks_.skip(LookTurns::Look::payload);
  if (!due || heads_.empty()) return std::nullopt;
  int at = MPI_UNDEFINED;
  int done = 0;
  MPI_Status status;
  const int code = MPI_Testany(static_cast<int>(heads_.size()), heads_.data(), &at, &done, &status);
  int error_class = MPI_SUCCESS;
  if (code != MPI_SUCCESS) MPI_Error_class(code, &error_class);
  if (error_class == MPI_ERR_TRUNCATE) {
    note_truncated(at);
    return poll_received();
  }
  check_mpi(code, "MPI_Testany");
  if (at == MPI_UNDEFINED || done == 0) {
    looks_.found_nothing(LookTurns::Look::payload, base::now_s());
    return std::nullopt;
  }
  looks_.found_something();
  Received received = take_head(static_cast<std::size_t>(at));
  received.bytes = message_bytes(status);
  return received;
}

// Open MPI frees every request with an error at once, also those that it does not name.
void MpiTransport::note_truncated(int named) {
  if (named != MPI_UNDEFINED) heads_[static_cast<std::size_t>(named)] = MPI_REQUEST_NULL;
  for (std::size_t at = 0; at < lanes_.size(); ++at) {
    if (heads_[at] != MPI_REQUEST_NULL || lanes_[at].posted.empty()) continue;
    Received received = take_head(at);
    received.bytes = received.buffer.size() + 1;
    received.truncated = true;
    truncated_.push_back(received);
  }
}

Received MpiTransport::take_head(std::size_t at) {
  Lane& lane = lanes_[at];
  const Posted posted = lane.posted.front();
  lane.posted.pop_front();
  heads_[at] = lane.posted.empty() ? MPI_REQUEST_NULL : lane.posted.front().request;
  return {.source = lane.source, .kind = MessageKind::payload, .buffer = posted.buffer};
}

std::optional<Incoming> MpiTransport::probe() {
  regions_.exchange_notices();
  if (!open_ || topology().num_nodes() == 1) return std::nullopt;
  if (!looks_.is_due(LookTurns::Look::others, base::now_s())) return std::nullopt;
  while (true) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, pair_.others, &found, &message, &status),
              "MPI_Improbe");
    if (found == 0) {
      looks_.found_nothing(LookTurns::Look::others, base::now_s());
      return std::nullopt;
    }
    looks_.found_something();
    const std::uint64_t bytes = message_bytes(status);
    const int tag = status.MPI_TAG;
    if (tag == abort_tag()) {
      take_abort(message, bytes);
    } else if (tag == tag_of(MessageKind::metadata) || tag == tag_of(MessageKind::control)) {
      const auto kind = static_cast<MessageKind>(tag - pair_.first_tag);
      const std::uint64_t id = next_id_++;
      probed_.emplace(id, Probed{message, status.MPI_SOURCE, kind, bytes});
      return Incoming{.source = status.MPI_SOURCE, .kind = kind, .bytes = bytes, .id = id};
    } else {
      drop(message, bytes);  // left behind by an earlier use of the communicator
    }
  }
}

void MpiTransport::accept(const Incoming& incoming, std::span<std::byte> buffer) {
  const auto found = probed_.find(incoming.id);
  if (found == probed_.end()) refuse_unprobed(incoming);
  check_buffer(incoming, found->second.bytes, buffer.size());
  require_mpi("accept");
  Accepted accepted{.probed = found->second, .buffer = buffer};
  probed_.erase(found);
  const MpiBytes length(accepted.probed.bytes);
  check_mpi(MPI_Imrecv(buffer.data(), length.count(), length.type(), &accepted.probed.message,
                       &accepted.request),
            "MPI_Imrecv");
  accepted_.push_back(accepted);
}

void MpiTransport::drop(MPI_Message message, std::uint64_t bytes) {
  Dropped& dropped = dropped_.emplace_back();
  dropped.memory.resize(bytes);
  const MpiBytes length(bytes);
  check_mpi(
      MPI_Imrecv(dropped.memory.data(), length.count(), length.type(), &message, &dropped.request),
      "MPI_Imrecv");
}

void MpiTransport::poll_abort() {
  // While a rank waits in a sub-group, nobody else of it may look at what the whole is told.
  if (whole_ != nullptr && whole_->sole_use()->try_lock()) {
    const std::unique_lock looking(*whole_->sole_use(), std::adopt_lock);
    whole_->poll_abort();
  }
  if (!open_ || topology().num_nodes() == 1 || sole_use()->is_forked()) return;
  int found = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  check_mpi(MPI_Improbe(MPI_ANY_SOURCE, abort_tag(), pair_.others, &found, &message, &status),
            "MPI_Improbe");
  if (found == 0) return;
  take_abort(message, message_bytes(status));
}

void MpiTransport::take_abort(MPI_Message message, std::uint64_t bytes) {
  std::string text(bytes, ' ');
  MPI_Mrecv(text.data(), static_cast<int>(bytes), MPI_BYTE, &message, MPI_STATUS_IGNORE);
  regions_.links().tell_abort(text);
}

std::optional<std::string> MpiTransport::aborted() const {
  if (sole_use()->is_forked()) return std::nullopt;  // a child has none of the node's memory
  if (auto text = regions_.links().aborted()) return text;
  return whole_ == nullptr ? std::nullopt : whole_->aborted();
}

std::unique_ptr<Transport> MpiTransport::make_subgroup(const std::vector<int>& ranks,
                                                       const Topology& topology,
                                                       double deadline_s) {
  require_mpi("subgroup");
  const auto look = [this] {
    poll_abort();
    if (const auto text = aborted()) throw Error(ErrorCode::peer_failed, *text);
  };
  const MPI_Comm comm = subgroup_comms_.of(ranks, pair_, deadline_s, look);
  auto made = mpi::attach(comm, {.topology = topology, .deadline_s = deadline_s});
  static_cast<MpiTransport&>(*made).whole_ = this;  // made by attach
  return made;
}

void MpiTransport::abort(const std::string& text) {
  if (sole_use()->is_forked() || aborted()) return;
  regions_.links().tell_abort(text);  // before, since it frees whoever waits inside
  const UseHold hold(sole_use());
  if (!open_) return;
  // Below every eager limit; the memory stays, because nobody waits for these sends.
  const auto* const kept = new std::string(text.substr(0, Hub::kTextBytes - 1));
  for (int target = 0; target < topology().num_ranks(); ++target) {
    if (topology().same_node(target, rank())) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Isend(kept->data(), static_cast<int>(kept->size()), MPI_BYTE, target, abort_tag(),
                  pair_.others, &request) == MPI_SUCCESS) {
      sends_.add(next_ticket_++, request);
    }
  }
}

WaitOutcome MpiTransport::wait_until(Waiter& waiter) {
  require_mpi("wait");
  return Transport::wait_until(waiter);
}

void MpiTransport::check_caller() const {
  Transport::check_caller();
  int is_main = 1;
  if (main_thread_only_ && open_) MPI_Is_thread_main(&is_main);
  if (is_main != 0) return;
  throw Error(ErrorCode::wrong_thread,
              fmt::format("rank {}: called on another thread than the one that initialised MPI, "
                          "which provides no more than MPI_THREAD_FUNNELED; fix: ask "
                          "MPI_Init_thread for MPI_THREAD_SERIALIZED or more",
                          rank()));
}

void MpiTransport::check_progress_thread() const {
  require_mpi("ProgressThread");
  if (thread_level() >= MPI_THREAD_MULTIPLE) return;
  throw Error(ErrorCode::unsupported,
              fmt::format("ProgressThread on rank {}: MPI was initialised for fewer threads; fix: "
                          "ask MPI_Init_thread for MPI_THREAD_MULTIPLE, or poll",
                          rank()));
}

void MpiTransport::rest(int round) {
  const bool gave_core_away = looks_.rest();
  if (round % kRoundsPerAbortPoll == 0) poll_abort();
  if (round < spin_rounds_) {
    for (int i = 0; i < kPausesPerSpin; ++i) spin_pause();
    return;
  }
  const int waited = round - spin_rounds_;
  if (waited < kYieldRounds) {
    if (!gave_core_away) ::sched_yield();
    return;
  }
  const int sleep_us =
      std::min(kFirstSleep_us * (1 + (waited - kYieldRounds) / 16), kLongestSleep_us);
  std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
}

}  // namespace ferry::detail
