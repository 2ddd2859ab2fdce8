// Messages and rest of a rank that is a thread; see threads_transport.hpp.

#include "transport/threads_transport.hpp"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "transport/misuse.hpp"

namespace ferry::detail {

namespace {

/// Metadata and control up to this size are copied by the sender.
constexpr std::uint64_t kCopiedBytes = 16 * 1024;

// The ladder of rest(). Measured with rings and barriers of 2, 4 and 8 ranks on two busy cores: to
// sleep after a few yields beat yielding on (barrier of 8: 60-75 us against 260-720 us) and beat
// sleeping at once (87-110 us). Spinning pays only where every rank has a core of its own.
constexpr int kSpinRounds = 20;
constexpr int kArmRound = 4;                // counted after the spins
constexpr int kSleepRound = kArmRound + 4;  // polls after arming, to learn what is looked for
constexpr int kPausesPerSpin = 8;
constexpr double kFirstSleep_s = 200e-6;
constexpr double kLongestSleep_s = 2e-3;
constexpr double kShortestSleep_s = 20e-6;  // a nearer delivery is met by yielding

/// What a failed rank is quoted with.
std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& failed) {
    return failed.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

ThreadsWorld::ThreadsWorld(const Topology& shape, double link_bits_per_s)
    : topology(shape),
      regions(shape),
      mailboxes(shape.num_ranks()),
      spin_rounds(shape.num_ranks() <= static_cast<int>(std::thread::hardware_concurrency())
                      ? kSpinRounds
                      : 0) {
  if (link_bits_per_s > 0) {
    links = std::make_shared<LinkModel>(shape, link_bits_per_s);
  }
  link_ranks.resize(static_cast<std::size_t>(shape.num_ranks()));
  std::iota(link_ranks.begin(), link_ranks.end(), 0);
  make_bells();
}

ThreadsWorld::ThreadsWorld(const ThreadsWorld& whole, const Topology& shape,
                           const std::vector<int>& ranks)
    : topology(shape),
      regions(shape),
      mailboxes(shape.num_ranks()),
      links(whole.links),
      spin_rounds(whole.spin_rounds) {
  for (const int rank : ranks) {
    link_ranks.push_back(whole.link_ranks[static_cast<std::size_t>(rank)]);
  }
  make_bells();
}

bool ThreadsWorld::take(int rank) {
  const std::lock_guard lock(taken_mutex_);
  taken_.resize(static_cast<std::size_t>(topology.num_ranks()), false);
  if (taken_[static_cast<std::size_t>(rank)]) return false;
  taken_[static_cast<std::size_t>(rank)] = true;
  return true;
}

void ThreadsWorld::make_bells() {
  for (int node = 0; node < topology.num_nodes(); ++node) {
    bells.push_back(std::make_unique<Doorbell>(static_cast<int>(topology.ranks_of(node).size())));
  }
}

void ThreadsWorld::abort(const std::string& text) {
  std::vector<std::weak_ptr<ThreadsWorld>> parts;
  {
    const std::lock_guard lock(subgroups_mutex_);
    if (!ended.set(text)) {
      return;
    }
    parts.swap(subgroups_);
  }
  for (const auto& bell : bells) {
    bell->ring_all(Doorbell::kAll);
  }
  for (const auto& part : parts) {
    if (const auto world = part.lock()) world->abort(text);
  }
}

std::shared_ptr<ThreadsWorld> ThreadsWorld::subgroup(const std::vector<int>& ranks,
                                                     const Topology& shape, int asker) {
  std::shared_ptr<ThreadsWorld> world;
  {
    const std::lock_guard lock(subgroups_mutex_);
    Series& series = series_[ranks];
    const int number = series.num_made[asker]++;
    Series::Open& open = series.open[number];
    if (!open.world) {
      open.world = std::make_shared<ThreadsWorld>(*this, shape, ranks);
      std::erase_if(subgroups_, [](const auto& part) { return part.expired(); });
      subgroups_.push_back(open.world);
    }
    world = open.world;
    if (++open.num_taken == ranks.size()) series.open.erase(number);
  }
  if (const auto text = ended.get()) world->abort(*text);
  return world;
}

void ThreadsWorld::fail(int rank, const std::exception_ptr& error) {
  {
    const std::lock_guard lock(failure_mutex);
    if (!failure) {
      failure = error;
    }
  }
  abort(fmt::format("rank {} failed: {}", rank, text_of(error)));
}

std::uint64_t ThreadsTransport::start_send(int target, MessageKind kind,
                                           std::span<const std::byte> bytes) {
  auto message = std::make_shared<Message>();
  message->source = rank();
  message->kind = kind;
  message->bytes = bytes;
  const bool copied = kind != MessageKind::payload && bytes.size() <= kCopiedBytes;
  if (copied) {
    message->keep_copy();
  }
  if (world_.links) {
    const LinkTimes times = world_.links->transmit(
        {world_.link_ranks[static_cast<std::size_t>(rank())],
         world_.link_ranks[static_cast<std::size_t>(target)], kind, bytes.size()},
        base::now_s());
    message->sent_at = times.left_s;
    message->visible_at = times.here_s;
  }
  std::uint64_t ticket = 0;  // 0: the memory is the caller's already
  if (!copied || world_.links) {
    ticket = next_ticket_++;
    sends_.emplace(ticket, message);
  }
  Mailbox& mailbox = world_.mailboxes[target];
  {
    const std::lock_guard lock(mailbox.mutex);
    mailbox.arrived.push_back(std::move(message));
    mailbox.num_arrived.fetch_add(1);
  }
  world_.ring(target);
  return ticket;
}

bool ThreadsTransport::sent(std::uint64_t ticket) {
  if (ticket == 0) {
    return true;
  }
  const auto found = sends_.find(ticket);
  if (found == sends_.end()) {
    refuse_ticket(rank(), ticket);
  }
  const Message& message = *found->second;
  const MessageState state = message.state.load(std::memory_order_acquire);
  const bool free =
      !message.borrowed || state == MessageState::taken || state == MessageState::withdrawn;
  if (!free || message.sent_at > time()) {
    return false;
  }
  sends_.erase(found);
  return true;
}

std::optional<Received> ThreadsTransport::poll_received() {
  fetch();
  if (inbox_.empty()) {
    return std::nullopt;
  }
  std::optional<Received> received = inbox_.take(time());
  if (received) {
    world_.ring(received->source);  // it may wait for its memory
  }
  return received;
}

std::unique_ptr<Transport> ThreadsTransport::make_subgroup(const std::vector<int>& ranks,
                                                           const Topology& topology,
                                                           double /*deadline_s*/) {
  // Nobody is waited for: whoever comes first makes the world, and who never comes is found
  // missing at the first call.
  const auto place = std::ranges::find(ranks, rank()) - ranks.begin();
  return std::make_unique<ThreadsTransport>(world_.subgroup(ranks, topology, rank()),
                                            static_cast<int>(place));
}

void ThreadsTransport::withdraw_sends() {
  for (const auto& [ticket, message] : sends_) {
    MessageState expected = MessageState::waiting;
    if (message->borrowed &&
        !message->state.compare_exchange_strong(expected, MessageState::withdrawn)) {
      while (message->state.load(std::memory_order_acquire) == MessageState::copying) {
        std::this_thread::yield();
      }
    }
  }
}

void ThreadsTransport::fetch() {
  Mailbox& mailbox = world_.mailboxes[rank()];
  if (mailbox.num_arrived.load(std::memory_order_acquire) == num_fetched_) {
    return;
  }
  {
    const std::lock_guard lock(mailbox.mutex);
    fetched_.swap(mailbox.arrived);
  }
  num_fetched_ += fetched_.size();
  for (MessagePtr& message : fetched_) {
    inbox_.arrive(std::move(message));
  }
  fetched_.clear();
}

void ThreadsTransport::disarm() {
  if (armed_) {
    bell_.disarm(place_);
    armed_ = false;
  }
}

/// How long to sleep after so many sleeps, never past what the links deliver next.
double ThreadsTransport::sleep_s(int sleeps) const {
  double seconds = std::min(kFirstSleep_s * (1 + sleeps / 4.0), kLongestSleep_s);
  if (!paced()) {
    return seconds;
  }
  const double now = base::now_s();
  if (const double visible_at = inbox_.next_visible_at(); visible_at > 0) {
    seconds = std::min(seconds, visible_at - now);
  }
  for (const auto& [ticket, message] : sends_) {
    if (message->sent_at > now) {
      seconds = std::min(seconds, message->sent_at - now);
    }
  }
  return seconds;
}

void ThreadsTransport::rest(int round) {
  if (round == 0) {
    disarm();  // it found something to do since it armed
  }
  if (round < world_.spin_rounds) {
    for (int i = 0; i < kPausesPerSpin; ++i) {
      spin_pause();
    }
    return;
  }
  const int waited = round - world_.spin_rounds;
  if (waited >= kArmRound && !armed_) {
    bell_.arm(place_);
    armed_ = true;
    looked_for_ = 0;
  }
  const double seconds = waited < kSleepRound ? 0 : sleep_s(waited - kSleepRound);
  if (seconds < kShortestSleep_s) {
    std::this_thread::yield();
    return;
  }
  bell_.sleep(place_, looked_for_ | Doorbell::kMessageBit, seconds);
  bell_.arm(place_);  // the next poll comes before the next sleep
}

}  // namespace ferry::detail
