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
  EXPECT_TRUE(options.routing_by_default);
  EXPECT_EQ(options.pattern, tools::RoutingPattern{});
  EXPECT_FALSE(options.wire.dispatch.has_value());
  EXPECT_FALSE(options.wire.combine.has_value());
}

TEST(BenchFlags, WireIsBothDirectionsUnlessCombineSaysOtherwise) {
  BenchFlags flags;
  flags.wire = "bf16";
  EXPECT_EQ(parse_bench_flags(flags).wire.dispatch, WireFormat::bf16);
  EXPECT_EQ(parse_bench_flags(flags).wire.combine, WireFormat::bf16);
  for (const char* either_order : {"bf16,combine=f32", "combine=f32,bf16"}) {
    flags.wire = either_order;
    EXPECT_EQ(parse_bench_flags(flags).wire.dispatch, WireFormat::bf16) << either_order;
    EXPECT_EQ(parse_bench_flags(flags).wire.combine, WireFormat::f32) << either_order;
  }
  for (const char* any_order :
       {"fp8,combine=int8,dispatch_backward=bf16,block=64",
        "block=64,dispatch_backward=bf16,combine=int8,dispatch=fp8_e4m3fn"}) {
    flags.wire = any_order;
    const tools::WireFormats wire = parse_bench_flags(flags).wire;
    EXPECT_EQ(wire.dispatch, WireFormat::fp8_e4m3fn) << any_order;
    EXPECT_EQ(wire.combine, WireFormat::int8) << any_order;
    EXPECT_EQ(wire.dispatch_backward, WireFormat::bf16) << any_order;
    EXPECT_FALSE(wire.combine_backward.has_value()) << any_order;
    EXPECT_EQ(wire.block_columns, 64) << any_order;
  }
  flags.wire = "combine=f32";
  EXPECT_FALSE(parse_bench_flags(flags).wire.dispatch.has_value());
  EXPECT_EQ(parse_bench_flags(flags).wire.combine, WireFormat::f32);
}

TEST(BenchFlags, WireFollowsFromAnError) {
  BenchFlags flags;
  flags.dtype = "f32";
  flags.wire = "auto,error=0.01,combine_backward=f16";
  const tools::WireFormats wire = parse_bench_flags(flags).wire.filled_in(DType::f32);
  EXPECT_EQ(wire.dispatch, WireFormat::int8);
  EXPECT_EQ(wire.combine, WireFormat::bf16);
  EXPECT_EQ(wire.combine_backward, WireFormat::f16);
  EXPECT_EQ(wire.dispatch_backward, WireFormat::bf16);
  EXPECT_EQ(wire.max_relative_error, 0.01);
  flags.wire = "auto";
  EXPECT_EQ(parse_bench_flags(flags).wire.filled_in(DType::f32).dispatch, WireFormat::f32);
  flags.wire = "sparse_bf16,ratio=0.25,combine=f32";
  EXPECT_EQ(parse_bench_flags(flags).wire.sparse_ratio, 0.25F);
}

TEST(BenchFlags, ALimitStandsBesideAFormatThatIsNamed) {
  BenchFlags flags;
  for (const char* wire : {"auto,error=0.005,dispatch=int8", "auto,error=0.005,combine=fp8"}) {
    flags.wire = wire;
    EXPECT_EQ(parse_bench_flags(flags).wire.filled_in(DType::bf16).max_relative_error, 0.005);
  }
  flags.wire = "auto,error=0.005";
  EXPECT_EQ(parse_bench_flags(flags).wire.filled_in(DType::bf16).max_relative_error, 0);
}

TEST(BenchFlags, AFastLinkLeavesRowsAsTheyAre) {
  BenchFlags flags;
  flags.wire = "auto,error=0.01";
  flags.plain.ranks_per_node = 2;
  flags.link_rate = "30gbit";
  EXPECT_EQ(parse_bench_flags(flags).wire.filled_in(DType::bf16).dispatch, WireFormat::int8);
  flags.link_rate = "100gbit";
  EXPECT_EQ(parse_bench_flags(flags).wire.filled_in(DType::bf16).dispatch, WireFormat::bf16);
}

TEST(BenchFlags, TokenMajorLeavesFlatOutOfAll) {
  BenchFlags flags;
  flags.layout = "token_major";
  flags.weights = "at_expert";
  const BenchOptions options = parse_bench_flags(flags);
  EXPECT_EQ(options.layout, Layout::token_major);
  EXPECT_EQ(options.weights, WeightMode::at_expert);
  EXPECT_EQ(options.strategies,
            (std::vector{Strategy::rank_dedup, Strategy::node_gather, Strategy::node_dedup}));
}

std::optional<launch::Launcher> launcher_of(int num_ranks) {
  return launch::Launcher{.name = "mpirun", .module = "openmpi", .num_ranks = num_ranks, .rank = 0};
}

std::string refusal_in_job(const BenchFlags& flags, int num_ranks) {
  try {
    parse_bench_flags(flags, launcher_of(num_ranks));
  } catch (const tools::UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(BenchFlags, ALauncherDecidesHowManyRanksThereAre) {
  BenchFlags flags;
  const BenchOptions found = parse_bench_flags(flags, launcher_of(6));
  EXPECT_EQ(found.num_ranks(), 6);
  EXPECT_TRUE(found.machines_as_found);
  flags.plain.num_nodes = 3;
  flags.plain.num_nodes_given = true;
  const BenchOptions split = parse_bench_flags(flags, launcher_of(6));
  EXPECT_EQ(split.ranks_per_node, 2);
  EXPECT_FALSE(split.machines_as_found);
  EXPECT_NE(refusal_in_job(flags, 4).find("3 ranks, but mpirun started 4; fix: make their product"),
            std::string::npos)
      << refusal_in_job(flags, 4);
  EXPECT_NE(refusal_in_job(flags, 0).find("does not say how many ranks"), std::string::npos);
  flags.tokens = "1,2,3,4,5,6";
  EXPECT_EQ(refusal_in_job(flags, 6), "accepted");
  flags.plain.ranks_per_node = 1;
  flags.plain.ranks_per_node_given = true;
  EXPECT_NE(refusal_in_job(flags, 6).find("3 ranks, but mpirun started 6"), std::string::npos);
  BenchFlags paced;
  paced.link_rate = "1gbit";
  EXPECT_NE(refusal_in_job(paced, 4).find("--link-rate under mpirun"), std::string::npos);
}

TEST(BenchFlags, TheBaselineNeedsALauncherAndItsOwnModes) {
  BenchFlags flags;
  flags.baselines = {"alltoallv", "alltoallv"};
  EXPECT_NE(refusal(flags).find("--baseline alltoallv: needs ranks that are MPI processes"),
            std::string::npos);
  EXPECT_TRUE(parse_bench_flags(flags, launcher_of(4)).baseline);
  EXPECT_FALSE(parse_bench_flags(flags, launcher_of(4)).rail_message);
  flags.weights = "at_expert";
  EXPECT_NE(refusal_in_job(flags, 4).find("--weights at_combine"), std::string::npos);
  flags.baselines = {"rail_message"};
  EXPECT_TRUE(parse_bench_flags(flags, launcher_of(4)).rail_message);
  EXPECT_NE(refusal(flags).find("--baseline rail_message: needs ranks"), std::string::npos);
  flags.baselines = {"gloo"};
  EXPECT_NE(refusal_in_job(flags, 4).find("--baseline gloo: no such baseline"), std::string::npos);
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
      {[](BenchFlags& f) { f.wire = "int8,error=0"; }, "--wire error=0: allowed: above 0"},
      {[](BenchFlags& f) { f.wire = "sparse_f16,ratio=2"; }, "--wire ratio=2: allowed: above 0"},
      {[](BenchFlags& f) { f.wire = "auto,error=0.01,dispatch=sparse_f16,ratio=0.5"; },
       "max_relative_error = 0.01 beside wire_sparse_ratio = 0.5 and wire_dispatch = sparse_f16"},
      {[](BenchFlags& f) { f.wire = "auto,error=1"; }, "--wire auto,error=1: "},
      {[](BenchFlags& f) { f.wire = "f32,error=0.1"; }, "is for fp8 and int8"},
      {[](BenchFlags& f) { f.wire = "int8,ratio=0.1"; }, "is for sparse formats"},
      {[](BenchFlags& f) { f.wire = "dispatch=int8,dispatch=bf16"; },
       "--wire dispatch=int8,dispatch=bf16: dispatch is named twice; fix:"},
      {[](BenchFlags& f) { f.wire = "bf16,fp8"; }, "the format of both directions is named twice"},
      {[](BenchFlags& f) { f.wire = "auto,fp8"; }, "the format of both directions is named twice"},
      {[](BenchFlags& f) { f.wire = "fp8,block=64,block=64"; }, "block is named twice"},
      {[](BenchFlags& f) { f.wire = "fp8,error=0.1,error=0.2"; }, "error is named twice"},
      {[](BenchFlags& f) { f.wire = "combine=f32,bf16,dispatch=f16"; },
       "dispatch and combine are named, so bf16 is for nothing; fix: leave one out"},
      {[](BenchFlags& f) { f.tokens = "1,2,3"; }, "3 counts for 8 ranks"},
      {[](BenchFlags& f) { f.tokens = "12x"; }, "'12x' is no token count"},
      {[](BenchFlags& f) { f.tokens = "-1"; }, "'-1' is no token count"},
      {[](BenchFlags& f) { f.routing = "zipf"; }, "--routing zipf: no such routing"},
      {[](BenchFlags& f) { f.routing = "zipf:nan"; }, "--routing zipf:nan"},
      {[](BenchFlags& f) { f.plain.num_nodes = 0; }, "--nodes 0: allowed: 1..1024"},
      {[](BenchFlags& f) { f.plain.num_nodes = 1000; }, "--nodes times --ranks-per-node 4000"},
      {[](BenchFlags& f) { f.plain.repeat = 0; }, "--repeat 0: allowed: 1.."},
      {[](BenchFlags& f) { f.plain.num_topk = 65; }, "--topk 65: allowed: 1..64"},
      {[](BenchFlags& f) { f.plain.hidden = 0; }, "--hidden 0: allowed: 1.."},
      {[](BenchFlags& f) {
         f.plain.layer = 3;
         f.tokens = "20";
       },
       "only a trace has layers"},
      {[](BenchFlags& f) {
         f.plain.trace_directory = std::string("dir");
         f.plain.num_experts = 8;
       },
       "--trace decides"},
      {[](BenchFlags& f) {
         f.plain.trace_directory = std::string("dir");
         f.routing = "uniform";
       },
       "--trace decides"},
      {[](BenchFlags& f) { f.fault = "all"; }, "--inject-fault all: allowed:"},
      {[](BenchFlags& f) { f.fault = "baseline"; }, "only with --baseline alltoallv"},
      {[](BenchFlags& f) { f.plain.mpi = "lam"; }, "--mpi lam: allowed: auto, openmpi, mpich, off"},
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
