#pragma once
// A few ranks in one thread: a test decides who works and what else crosses the network. Every
// token goes to an expert of every other rank, so each rank needs all others.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/send_log.hpp"
#include "exchange/tampering.hpp"
#include "ferry/ferry.hpp"
#include "transport/stepped.hpp"

namespace ferry::testing {

inline constexpr std::int64_t kHidden = 16;
inline constexpr std::int64_t kRowBytes = kHidden * 4;
inline constexpr std::int64_t kTokens = 24;
inline constexpr std::int64_t kRowsPerFragment = 2;
inline constexpr std::int64_t kFragments = kTokens / kRowsPerFragment;  ///< of a lane, one a range
inline constexpr std::uint64_t kPayloadBytes = kRowsPerFragment * kRowBytes;
inline constexpr std::uint64_t kFragmentBytes = 72 + kPayloadBytes;  ///< with its header

/// Ranks that are nodes of their own.
inline Topology nodes(int num_ranks) { return Topology::uniform(num_ranks, 1); }

/// node_dedup in ranges of one fragment, two of them in flight.
ExchangeOptions small_ranges();

class SteppedRanks {
 public:
  explicit SteppedRanks(const Topology& topology, const ExchangeOptions& options = small_ranges(),
                        std::int64_t hidden = kHidden);

  SendLog& transport(int rank) { return *logs_[static_cast<std::size_t>(rank)]; }
  /// Between a rank and the others.
  Tampering& network(int rank) { return *networks_[static_cast<std::size_t>(rank)]; }
  Exchange& exchange(int rank) { return *ranks_[static_cast<std::size_t>(rank)].exchange; }
  void drop_exchange(int rank) { ranks_[static_cast<std::size_t>(rank)].exchange.reset(); }
  Routing routing(int rank) const;
  ConstMatrix x(int rank);
  Matrix out(int rank);
  std::vector<int> all() const;
  /// Gives every element of every x, which are 1, a value of its own.
  void number_x();
  /// What is wrong with `out` after a combine of experts that give back what they get; else empty.
  std::string find_out_error(int rank) const;

  /// The given ranks work for so many steps of the world; the others do nothing.
  void work(const std::vector<int>& ranks, int steps);
  /// The same until `done`, or until all calls are. False when that takes far too long.
  bool work_until(const std::vector<int>& ranks, const std::function<bool()>& done);
  template <typename Result>
  bool work_until_done(const std::vector<Pending<Result>>& calls) {
    return work_until(all(), [&] {
      return std::ranges::all_of(calls, [](const auto& call) { return call.done(); });
    });
  }
  /// plan() of all ranks. Requires: it succeeds
  std::vector<Plan> plan_all();
  /// One dispatch and combine of all ranks on their plans; fails the test where they do not end.
  void use(const std::vector<Plan>& plans);

  /// Hands a message to the network as if the library of `source` had sent it.
  void forge(int source, int target, MessageKind kind, std::vector<std::byte> bytes);
  /// Receives for payload of `source` that a rank has posted and no message has filled.
  std::size_t num_posted(int rank, int source);

 private:
  struct Rank {
    std::optional<Exchange> exchange;
    std::vector<std::int32_t> ids;
    std::vector<float> x;
    std::vector<float> out;
  };
  const std::int64_t hidden_;
  stepped::World world_;
  std::vector<std::unique_ptr<Tampering>> networks_;
  std::vector<std::unique_ptr<SendLog>> logs_;
  std::deque<Rank> ranks_;
};

/// With what a call failed that has ended; nothing when it ended well.
template <typename Result>
std::optional<Error> error_of(Pending<Result>& pending) {
  try {
    pending.wait();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

/// Fails the test unless there is an error with this code, and these words in its text.
void expect_error(const std::optional<Error>& error, ErrorCode code, const std::string& words);

}  // namespace ferry::testing
