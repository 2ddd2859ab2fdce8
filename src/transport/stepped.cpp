// The stepped world: one thread, time in steps, everything drawn from one seed. Every message is
// copied when it is sent; a send that completes late is compared with its copy at that moment, so
// that a sender which touches the memory too early is caught here and not as a wrong result later.

#include "transport/stepped.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/check.hpp"
#include "base/hash.hpp"
#include "ferry/error.hpp"
#include "transport/abort_text.hpp"
#include "transport/inbox.hpp"
#include "transport/misuse.hpp"
#include "transport/regions.hpp"

namespace ferry::stepped {

// World::Impl has a name outside this file, and so has what it is made of.

using detail::Message;
using detail::MessagePtr;

class SteppedTransport;

/// Memory that only kernels may touch.
class ClosedMemory {
 public:
  void add(std::span<std::byte> memory) {
    spans_.push_back(memory);
    if (num_open_ == 0) protect(memory, PROT_NONE);
  }
  void remove(const std::byte* begin) {
    std::erase_if(spans_, [begin](const auto& span) { return span.data() == begin; });
  }
  void open() {
    if (num_open_++ > 0) return;
    for (const auto& span : spans_) protect(span, PROT_READ | PROT_WRITE);
  }
  void close() {
    if (--num_open_ > 0) return;
    for (const auto& span : spans_) protect(span, PROT_NONE);
  }

 private:
  static void protect(std::span<std::byte> memory, int access) {
    const int failed = ::mprotect(memory.data(), memory.size(), access);
    FERRY_ASSERT(failed == 0, "mprotect of {} bytes failed", memory.size());
  }
  std::vector<std::span<std::byte>> spans_;
  int num_open_ = 0;
};

/// What all ranks see.
struct Shared {
  explicit Shared(const Options& given) : options(given), regions(given.topology) {}

  std::uint64_t draw(std::uint64_t bound) {
    FERRY_ASSERT(bound > 0, "draw: nothing is below 0");
    return base::mix64(base::mix64(options.seed) + ++num_draws) % bound;
  }
  /// A step in the future, at most the longest delay away.
  std::uint64_t draw_due() {
    return now + 1 + draw(static_cast<std::uint64_t>(std::max(options.max_delay_steps, 1)));
  }

  Options options;
  detail::RegionTable regions;
  detail::AbortText ended;
  ClosedMemory closed;
  std::uint64_t now = 0;
  std::uint64_t num_draws = 0;
  std::vector<std::unique_ptr<SteppedTransport>> ranks;
  std::vector<std::pair<int, int>> to_corrupt;  // (source, target) of coming payload messages
};

class SteppedTransport final : public Transport {
 public:
  SteppedTransport(Shared& shared, int rank)
      : Transport(rank, shared.options.topology),
        shared_(shared),
        inbox_(shared.options.topology) {}

  ~SteppedTransport() override { attachment.reset(); }

  std::string_view name() const override { return "stepped"; }
  void check_progress_thread() const override {
    throw Error(ErrorCode::unsupported,
                "ProgressThread: ranks of the stepped transport work in one thread, one step at a "
                "time; fix: use threads");
  }
  std::uint64_t preferred_fragment_bytes() const override { return shared_.options.fragment_bytes; }

  std::byte* create_region(std::uint64_t key, std::uint64_t bytes) override {
    std::byte* const region = shared_.regions.create(rank(), key, bytes);
    if (shared_.options.close_payload) created_[key] = {region, bytes};
    return region;
  }
  void mark_payload(std::uint64_t key, std::uint64_t from) override {
    if (!shared_.options.close_payload) return;
    shared_.closed.add(created_.at(key).subspan(from));
    payload_[key] = created_.at(key).data() + from;
  }
  std::byte* map_region(int owner, std::uint64_t key) override {
    return shared_.regions.map(rank(), owner, key);
  }
  void retire_region(std::uint64_t key) override {
    if (const auto payload = payload_.extract(key)) shared_.closed.remove(payload.mapped());
    shared_.regions.retire(rank(), key);
  }
  std::shared_ptr<const void> hold_region(std::uint64_t key) override {
    return shared_.regions.hold(rank(), key);
  }

  bool sent(std::uint64_t ticket) override;
  void post_receive(int source, std::span<std::byte> buffer) override {
    inbox_.post(source, buffer);
  }
  std::vector<std::span<std::byte>> withdraw_receives(int source) override {
    return inbox_.withdraw(source);
  }
  std::optional<Received> poll_received() override { return inbox_.take(time()); }
  std::optional<Incoming> probe() override { return inbox_.probe(time()); }
  void accept(const Incoming& incoming, std::span<std::byte> buffer) override {
    inbox_.accept(incoming, buffer);
  }

  WaitOutcome wait_until(Waiter& waiter) override;

  void abort(const std::string& text) override { shared_.ended.set(text); }
  std::optional<std::string> aborted() const override { return shared_.ended.get(); }

  /// Ends the sends that are due at this step.
  void complete_sends();

 protected:
  std::uint64_t start_send(int target, MessageKind kind, std::span<const std::byte> bytes) override;
  void begin_kernel() override { shared_.closed.open(); }
  void end_kernel() override { shared_.closed.close(); }

 private:
  struct Send {
    std::span<const std::byte> memory;
    MessagePtr message;
    bool complete = false;
  };

  double time() const { return static_cast<double>(shared_.now); }

  Shared& shared_;
  detail::Inbox inbox_;
  std::map<std::uint64_t, std::span<std::byte>> created_;
  std::map<std::uint64_t, std::byte*> payload_;  ///< where it begins in a region
  std::uint64_t next_ticket_ = 1;
  std::unordered_map<std::uint64_t, Send>
      sends_;  // by ticket; those that completed at once are not
};

std::uint64_t SteppedTransport::start_send(int target, MessageKind kind,
                                           std::span<const std::byte> bytes) {
  auto message = std::make_shared<Message>();
  message->source = rank();
  message->kind = kind;
  message->bytes = bytes;
  message->keep_copy();
  message->visible_at = static_cast<double>(shared_.draw_due());
  auto& to_corrupt = shared_.to_corrupt;
  const auto marked = std::find(to_corrupt.begin(), to_corrupt.end(), std::pair{rank(), target});
  if (marked != to_corrupt.end() && kind == MessageKind::payload && !bytes.empty()) {
    message->flipped_bit = shared_.draw(bytes.size() * 8);
    to_corrupt.erase(marked);
  }
  std::uint64_t ticket = 0;  // 0: the memory is the caller's already
  if (shared_.draw(2) == 0) {
    message->sent_at = static_cast<double>(shared_.draw_due());
    ticket = next_ticket_++;
    sends_.emplace(ticket, Send{bytes, message});
  }
  shared_.ranks[target]->inbox_.arrive(std::move(message));
  return ticket;
}

bool SteppedTransport::sent(std::uint64_t ticket) {
  if (ticket == 0) {
    return true;
  }
  const auto found = sends_.find(ticket);
  if (found == sends_.end()) {
    detail::refuse_ticket(rank(), ticket);
  }
  if (!found->second.complete) {
    return false;
  }
  sends_.erase(found);
  return true;
}

void SteppedTransport::complete_sends() {
  for (auto& [ticket, send] : sends_) {
    if (send.complete || send.message->sent_at > time()) {
      continue;
    }
    send.complete = true;
    const std::vector<std::byte>& copy = send.message->copy;
    // After an abort the sender may have been torn down with its memory.
    FERRY_ASSERT(shared_.ended.is_set() || copy.empty() ||
                     std::memcmp(copy.data(), send.memory.data(), copy.size()) == 0,
                 "the {} bytes of send {} of rank {} changed before sent() said so", copy.size(),
                 ticket, rank());
  }
}

WaitOutcome SteppedTransport::wait_until(Waiter& waiter) {
  if (waiter.poll() == Progress::done) {
    return WaitOutcome::done;
  }
  throw Error(ErrorCode::unsupported,
              fmt::format("wait_until: a blocking call of rank {} cannot run on the stepped "
                          "transport, where all ranks share one thread; allowed: calls that are "
                          "already done; fix: use start_* and progress(), and World::step between",
                          rank()));
}

namespace {

void check_options(const Options& options) {
  if (options.max_delay_steps < 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("stepped::World: max_delay_steps = {}; allowed: 0 (the next step) or "
                            "more; fix: correct it",
                            options.max_delay_steps));
  }
}

}  // namespace

struct World::Impl : Shared {
  using Shared::Shared;
  ~Impl() {
    // Attachments may still use the memory and messages of other ranks.
    for (const auto& rank : ranks) {
      rank->attachment.reset();
    }
  }
};

World::World(const Options& options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(options);
  for (int rank = 0; rank < options.topology.num_ranks(); ++rank) {
    impl_->ranks.push_back(std::make_unique<SteppedTransport>(*impl_, rank));
  }
}

World::~World() = default;

Transport& World::transport(int rank) { return *impl_->ranks.at(rank); }

const Topology& World::topology() const { return impl_->options.topology; }

void World::step() {
  ++impl_->now;
  for (const auto& rank : impl_->ranks) {
    rank->complete_sends();
  }
}

std::uint64_t World::now() const { return impl_->now; }

std::uint64_t World::draw(std::uint64_t bound) { return impl_->draw(bound); }

void World::corrupt_next(int source, int target) { impl_->to_corrupt.emplace_back(source, target); }

void World::add_payload(std::span<std::byte> memory) { impl_->closed.add(memory); }

PayloadOpen::PayloadOpen(World& world) : world_(world) { world_.impl_->closed.open(); }
PayloadOpen::~PayloadOpen() { world_.impl_->closed.close(); }

}  // namespace ferry::stepped
