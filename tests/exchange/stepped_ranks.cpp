// Ranks in one thread: see stepped_ranks.hpp.

#include "exchange/stepped_ranks.hpp"

#include <cmath>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "exchange/engine.hpp"

namespace ferry::testing {
namespace {

constexpr int kMostSteps = 20'000;

}  // namespace

ExchangeOptions small_ranges() {
  return {.fragment_bytes = static_cast<std::int64_t>(kFragmentBytes),
          .range_tokens = kRowsPerFragment,
          .ranges_in_flight = 2};
}

SteppedRanks::SteppedRanks(const Topology& topology, const ExchangeOptions& options,
                           std::int64_t hidden)
    : hidden_(hidden), world_({.topology = topology, .max_delay_steps = 3}) {
  const int num_ranks = topology.num_ranks();
  for (int rank = 0; rank < num_ranks; ++rank) {
    networks_.push_back(std::make_unique<Tampering>(world_.transport(rank)));
    logs_.push_back(std::make_unique<SendLog>(*networks_.back()));
    ranks_.push_back({Exchange(transport(rank), Placement::contiguous(num_ranks, num_ranks),
                               {.hidden = hidden, .dtype = DType::f32}, options),
                      {},
                      std::vector<float>(kTokens * hidden, 1.0F),
                      std::vector<float>(kTokens * hidden)});
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (int other = 0; other < num_ranks; ++other) {
        if (other != rank) ranks_.back().ids.push_back(other);
      }
    }
  }
}

Routing SteppedRanks::routing(int rank) const {
  const std::vector<std::int32_t>& ids = ranks_[static_cast<std::size_t>(rank)].ids;
  return Routing::of(kTokens, static_cast<int>(ranks_.size()) - 1, std::span(ids));
}

ConstMatrix SteppedRanks::x(int rank) {
  return {ranks_[static_cast<std::size_t>(rank)].x.data(), DType::f32, kTokens, hidden_, 0};
}

Matrix SteppedRanks::out(int rank) {
  return {ranks_[static_cast<std::size_t>(rank)].out.data(), DType::f32, kTokens, hidden_, 0};
}

void SteppedRanks::number_x() {
  std::size_t next = 0;
  for (Rank& rank : ranks_) {
    for (float& value : rank.x) value = static_cast<float>(++next % 4093);
  }
}

std::string SteppedRanks::find_out_error(int rank) const {
  const Rank& own = ranks_[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < own.out.size(); ++i) {
    // The weights of a token add up to 1.
    if (std::abs(own.out[i] - own.x[i]) <= 1e-5F * own.x[i]) continue;
    return fmt::format("out[{}] is {}; expected {}", i, own.out[i], own.x[i]);
  }
  return {};
}

std::vector<int> SteppedRanks::all() const {
  std::vector<int> ranks(ranks_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void SteppedRanks::work(const std::vector<int>& ranks, int steps) {
  for (int step = 0; step < steps; ++step) {
    world_.step();
    for (const int rank : ranks) ferry::detail::Engine::of(transport(rank)).progress();
  }
}

bool SteppedRanks::work_until(const std::vector<int>& ranks, const std::function<bool()>& done) {
  for (int step = 0; step < kMostSteps; ++step) {
    if (done()) return true;
    work(ranks, 1);
  }
  return done();
}

std::vector<Plan> SteppedRanks::plan_all() {
  std::vector<Pending<Plan>> pending;
  for (const int rank : all()) pending.push_back(exchange(rank).start_plan(routing(rank)));
  EXPECT_TRUE(work_until_done(pending));
  std::vector<Plan> plans;
  for (Pending<Plan>& one : pending) plans.push_back(one.wait());
  return plans;
}

void SteppedRanks::use(const std::vector<Plan>& plans) {
  std::vector<Pending<ExpertRows>> dispatching;
  for (const int rank : all()) {
    dispatching.push_back(
        exchange(rank).start_dispatch(plans[static_cast<std::size_t>(rank)], x(rank)));
  }
  ASSERT_TRUE(work_until_done(dispatching));
  std::vector<ExpertRows> rows;
  std::vector<Pending<void>> combining;
  for (const int rank : all()) {
    rows.push_back(dispatching[static_cast<std::size_t>(rank)].wait());
    combining.push_back(exchange(rank).start_combine(plans[static_cast<std::size_t>(rank)],
                                                     rows.back().matrix(), out(rank)));
  }
  ASSERT_TRUE(work_until_done(combining));
  for (Pending<void>& one : combining) one.wait();
}

void SteppedRanks::forge(int source, int target, MessageKind kind, std::vector<std::byte> bytes) {
  network(source).inject({target, kind, std::move(bytes)});
}

std::size_t SteppedRanks::num_posted(int rank, int source) {
  const std::vector<std::span<std::byte>> posted = transport(rank).withdraw_receives(source);
  for (const std::span<std::byte> buffer : posted) transport(rank).post_receive(source, buffer);
  return posted.size();
}

void expect_error(const std::optional<Error>& error, ErrorCode code, const std::string& words) {
  ASSERT_TRUE(error.has_value()) << "no error with: " << words;
  EXPECT_EQ(error->code(), code) << error->what();
  EXPECT_NE(std::string(error->what()).find(words), std::string::npos)
      << "no '" << words << "' in: " << error->what();
}

}  // namespace ferry::testing
