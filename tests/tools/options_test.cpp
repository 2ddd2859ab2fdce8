// Flags as text: what they mean, and what a refusal says.

#include "bench/options.hpp"

#include <gtest/gtest.h>

#include "common/failures.hpp"

namespace ferry::bench {
namespace {

std::string refusal(const BenchFlags& flags) {
  try {
    parse_bench_flags(flags);
  } catch (const tools::UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LinkRate, KnowsTheUnitsOfNetworks) {
  EXPECT_EQ(parse_link_rate("0"), 0);
  EXPECT_EQ(parse_link_rate("1gbit"), 1e9);
  EXPECT_EQ(parse_link_rate("2.5gbit"), 2.5e9);
  EXPECT_EQ(parse_link_rate("100mbit"), 1e8);
  EXPECT_EQ(parse_link_rate("64kbit"), 64e3);
  for (const char* bad :
       {"", "1", "gbit", "1gb", "-1gbit", "0gbit", "nangbit", "infgbit", "1gbitx", "1 gbit"}) {
    EXPECT_THROW(parse_link_rate(bad), tools::UsageError) << bad;
  }
}

TEST(BenchFlags, Defaults) {
  const BenchOptions options = parse_bench_flags({});
  EXPECT_EQ(options.strategies.size(), 4U);
  EXPECT_EQ(options.num_ranks(), 8);
  EXPECT_EQ(options.pattern, tools::RoutingPattern{});
  EXPECT_FALSE(options.wire_dispatch.has_value());
  EXPECT_FALSE(options.wire_combine.has_value());
}

TEST(BenchFlags, WireIsBothDirectionsUnlessCombineSaysOtherwise) {
  BenchFlags flags;
  flags.wire = "bf16";
  EXPECT_EQ(parse_bench_flags(flags).wire_dispatch, DType::bf16);
  EXPECT_EQ(parse_bench_flags(flags).wire_combine, DType::bf16);
  for (const char* either_order : {"bf16,combine=f32", "combine=f32,bf16"}) {
    flags.wire = either_order;
    EXPECT_EQ(parse_bench_flags(flags).wire_dispatch, DType::bf16) << either_order;
    EXPECT_EQ(parse_bench_flags(flags).wire_combine, DType::f32) << either_order;
  }
  flags.wire = "combine=f32";
  EXPECT_FALSE(parse_bench_flags(flags).wire_dispatch.has_value());
  EXPECT_EQ(parse_bench_flags(flags).wire_combine, DType::f32);
}

TEST(BenchFlags, TokenMajorLeavesFlatOutOfAll) {
  BenchFlags flags;
  flags.layout = "token_major";
  flags.weights = "at_expert";
  const BenchOptions options = parse_bench_flags(flags);
  EXPECT_EQ(options.layout, Layout::token_major);
  EXPECT_EQ(options.weights, WeightMode::at_expert);
  EXPECT_EQ(options.strategies, (std::vector{Strategy::rank_dedup, Strategy::node_gather,
                                             Strategy::node_dedup}));
}

TEST(BenchFlags, RefusalsNameFlagValueAndWhatIsAllowed) {
  struct Case {
    void (*change)(BenchFlags&);
    const char* text;
  };
  const Case cases[] = {
      {[](BenchFlags& f) { f.strategy = "best"; }, "--strategy best: no such strategy; allowed:"},
      {[](BenchFlags& f) { f.strategy = "flat,flat"; }, "named twice"},
      {[](BenchFlags& f) { f.layout = "rows"; }, "--layout rows: allowed:"},
      {[](BenchFlags& f) { f.weights = "half"; }, "--weights half: allowed:"},
      {[](BenchFlags& f) { f.layout = "token_major"; }, "--weights at_expert or none"},
      {[](BenchFlags& f) {
         f.layout = "token_major";
         f.weights = "none";
         f.strategy = "flat";
       },
       "--strategy flat: sends one row per expert"},
      {[](BenchFlags& f) { f.dtype = "fp8"; }, "--dtype fp8: no such format; allowed:"},
      {[](BenchFlags& f) { f.wire = "bf16,combine=x"; }, "--wire combine x: no such format"},
      {[](BenchFlags& f) { f.tokens = "1,2,3"; }, "3 counts for 8 ranks"},
      {[](BenchFlags& f) { f.tokens = "12x"; }, "'12x' is no token count"},
      {[](BenchFlags& f) { f.tokens = "-1"; }, "'-1' is no token count"},
      {[](BenchFlags& f) { f.plain.routing = "zipf"; }, "--routing zipf: no such routing"},
      {[](BenchFlags& f) { f.plain.routing = "zipf:nan"; }, "--routing zipf:nan"},
      {[](BenchFlags& f) { f.plain.num_nodes = 0; }, "--nodes 0: allowed: 1..1024"},
      {[](BenchFlags& f) { f.plain.num_nodes = 1000; }, "--nodes times --ranks-per-node 4000"},
      {[](BenchFlags& f) { f.plain.repeat = 0; }, "--repeat 0: allowed: 1.."},
      {[](BenchFlags& f) { f.plain.num_topk = 65; }, "--topk 65: allowed: 1..64"},
      {[](BenchFlags& f) { f.plain.hidden = 0; }, "--hidden 0: allowed: 1.."},
      {[](BenchFlags& f) { f.plain.layer = 3; }, "only a trace has layers"},
      {[](BenchFlags& f) {
         f.plain.trace_directory = std::string("dir");
         f.plain.num_experts = 8;
       },
       "--trace decides"},
      {[](BenchFlags& f) { f.fault = "all"; }, "--inject-fault all: allowed:"},
  };
  for (const Case& one : cases) {
    BenchFlags flags;
    one.change(flags);
    const std::string text = refusal(flags);
    EXPECT_NE(text.find(one.text), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace ferry::bench
