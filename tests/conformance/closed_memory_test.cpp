// Payload memory is closed to the host but inside kernels: plan, wire and control never look at it,
// so that it may lie in device memory. A touch outside a kernel ends the test with SIGSEGV.

#include <algorithm>

#include <sys/mman.h>

#include <fmt/format.h>

#include <gtest/gtest.h>

#include "conformance/scenario.hpp"
#include "support/rows.hpp"
#include "support/verify.hpp"
#include "transport/stepped.hpp"

namespace ferry::conformance {
namespace {

constexpr std::int64_t kHidden = 19;
constexpr std::int64_t kTokens = 9;

/// Pages for one matrix of the caller, closed like all payload.
class CallerRows {
 public:
  CallerRows(stepped::World& world, std::int64_t rows, DType dtype) : rows_(rows), dtype_(dtype) {
    memory_ = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    world.add_payload({static_cast<std::byte*>(memory_), kBytes});
  }
  Matrix matrix() const { return {memory_, dtype_, rows_, kHidden, 0}; }
  /// The tail of the pages, for the bytes that travel with rows.
  std::span<std::byte> extra(std::size_t bytes) const {
    return {static_cast<std::byte*>(memory_) + kBytes / 2, bytes};
  }

 private:
  static constexpr std::size_t kBytes = 8 * 4096;
  std::int64_t rows_;
  DType dtype_;
  void* memory_;  // goes with the process: a world that failed may still name it
};

template <typename Result>
std::vector<Result> finish(stepped::World& world, std::vector<Pending<Result>>& pending) {
  for (int step = 0; step < 100000; ++step) {
    world.step();
    bool all = true;
    for (Pending<Result>& one : pending) all &= one.progress();
    if (!all) continue;
    std::vector<Result> results;
    for (Pending<Result>& one : pending) results.push_back(one.wait());
    return results;
  }
  throw std::runtime_error("no end");
}

struct Mode {
  Strategy strategy;
  ExchangeOptions options;
};

std::vector<ExchangeOptions> modes() {
  std::vector<ExchangeOptions> result;
  for (const Strategy strategy :
       {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather, Strategy::node_dedup}) {
    result.push_back({.strategy = strategy, .wire_dispatch = WireFormat::bf16});
    result.push_back({.strategy = strategy,
                      .wire_dispatch = WireFormat::fp8_e4m3fn,
                      .wire_combine = WireFormat::int8});
    result.push_back({.strategy = strategy, .row_alignment = 4, .extra_bytes = 12});
    if (strategy == Strategy::flat) continue;
    result.push_back({.strategy = strategy,
                      .layout = Layout::token_major,
                      .weights = WeightMode::at_expert,
                      .extra_bytes = 4});
  }
  for (ExchangeOptions& options : result) {
    options.fragment_bytes = 400;
    options.range_tokens = 4;
  }
  return result;
}

void run_closed(const ExchangeOptions& options, bool y_in_window) {
  const Topology topology = Topology::uniform(2, 2);
  const Placement placement = Placement::contiguous(6, 4);
  stepped::World world({.topology = topology, .seed = 5, .close_payload = true});
  const std::vector<std::int64_t> tokens(4, kTokens);
  const std::vector<RoutingData> routing =
      support::make_all_routing({.num_experts = 6, .num_topk = 3}, tokens, 3);

  std::vector<Exchange> exchanges;
  std::vector<CallerRows> x;
  std::vector<CallerRows> out;
  for (int rank = 0; rank < 4; ++rank) {
    exchanges.emplace_back(world.transport(rank), placement, RowShape{kHidden, DType::f32},
                           options);
    x.emplace_back(world, kTokens, DType::f32);
    out.emplace_back(world, kTokens, DType::f32);
    const stepped::PayloadOpen open(world);
    support::fill_rows(17, rank, x[rank].matrix());
  }
  std::vector<Pending<Plan>> planning;
  for (int rank = 0; rank < 4; ++rank) {
    planning.push_back(exchanges[rank].start_plan(routing[rank].view()));
  }
  const std::vector<Plan> plans = finish(world, planning);
  std::vector<Pending<ExpertRows>> dispatching;
  for (int rank = 0; rank < 4; ++rank) {
    const auto extra = x[rank].extra(static_cast<std::size_t>(kTokens * options.extra_bytes));
    dispatching.push_back(exchanges[rank].start_dispatch(plans[rank], x[rank].matrix(), extra));
    poison_free_slots(world.transport(rank), 0xFF);
  }
  const std::vector<ExpertRows> rows = finish(world, dispatching);
  std::vector<Pending<void>> combining;
  std::vector<OutputRows> outputs;
  std::vector<CallerRows> plain;
  for (int rank = 0; rank < 4; ++rank) {
    outputs.push_back(exchanges[rank].output(plans[rank]));
    plain.emplace_back(world, plans[rank].num_rows(), DType::f32);
    const Matrix y = y_in_window ? outputs[rank].matrix() : plain[rank].matrix();
    {
      const stepped::PayloadOpen open(world);
      for (std::int64_t row = 0; row < y.rows; ++row) {
        std::memcpy(y.row(row), rows[rank].matrix().row(row), kHidden * sizeof(float));
      }
    }
    combining.push_back(exchanges[rank].start_combine(plans[rank], y, out[rank].matrix()));
  }
  for (int step = 0; step < 100000; ++step) {
    world.step();
    bool all = true;
    for (Pending<void>& one : combining) all &= one.progress();
    if (all) break;
  }
  for (Pending<void>& one : combining) one.wait();
  // Every token has an expert, and experts pass rows on: nothing may be left as it was.
  const stepped::PayloadOpen open(world);
  for (int rank = 0; rank < 4; ++rank) {
    for (std::int64_t token = 0; token < kTokens; ++token) {
      const auto* const sum = reinterpret_cast<const float*>(out[rank].matrix().row(token));
      // A small value may well be 0 after int8, but no row is.
      EXPECT_TRUE(std::any_of(sum, sum + kHidden, [](float value) { return value != 0; }))
          << "rank " << rank << ", token " << token;
    }
  }
}

TEST(ClosedMemory, OnlyKernelsTouchPayload) {
  for (const ExchangeOptions& options : modes()) {
    for (const bool y_in_window : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}, y in window {}", to_string(options.strategy),
                               to_string(options.layout), y_in_window));
      run_closed(options, y_in_window);
    }
  }
}

TEST(ClosedMemory, ATouchOutsideAKernelIsFound) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  stepped::World world({.topology = Topology::single_node(1), .close_payload = true});
  const CallerRows rows(world, 1, DType::f32);
  EXPECT_DEATH(rows.matrix().row(0)[0] = std::byte{1}, "");
}

}  // namespace
}  // namespace ferry::conformance
