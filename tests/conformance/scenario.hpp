#pragma once
// What the conformance tests have in common: a layer (routing of all ranks, rows by seed, and what
// must come out), its memory on one rank, and the body that runs and checks it.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "conformance/points.hpp"
#include "ferry/exchange.hpp"
#include "support/backward_reference.hpp"
#include "support/rank_program.hpp"
#include "support/reference.hpp"
#include "support/routing.hpp"

namespace ferry::conformance {

using support::ProgramOptions;
using support::ProgramResult;
using support::RankContext;
using support::Reference;
using support::RoutingData;
using support::RoutingSpec;
using support::Task;

/// A token whose whole row is one value, for Inf and NaN.
struct SpecialRow {
  int rank = 0;
  std::int64_t token = 0;
  float value = 0;
};

/// Routing of all ranks and where rows go. Rows are hashes of a seed that each use names.
class Layer {
 public:
  Layer(Group group, std::vector<RoutingData> routing);

  const Group& group() const { return group_; }
  Routing routing(int rank) const { return routing_[static_cast<std::size_t>(rank)].view(); }
  const std::vector<RoutingData>& all_routing() const { return routing_; }
  RoutingData& data(int rank) { return routing_[static_cast<std::size_t>(rank)]; }
  /// What must come out for rows of `seed`.
  Reference reference(std::uint64_t seed) const;
  /// Rows that are special whatever the seed.
  std::vector<SpecialRow> special_rows;
  /// What gradients of rows are multiplied with, a power of two.
  float gradient_factor = 1;

 private:
  Group group_;
  std::vector<RoutingData> routing_;
};

/// The group's options, and small fragments and ranges so that little data already takes several of
/// both.
ExchangeOptions options_of(const Group& group);
Exchange make_exchange(RankContext& context, const Group& group);

/// Heap memory for a matrix whose rows are followed by bytes that nobody may write. Starts as NaN.
class GuardedMatrix {
 public:
  GuardedMatrix(std::int64_t rows, std::int64_t columns, DType dtype);
  Matrix matrix();
  /// NaN in every element again.
  void poison();
  /// Requires that nothing was written between and after the rows.
  void require_guards() const;
  /// Bits of all elements in one number.
  std::uint64_t hash();

 private:
  std::int64_t rows_;
  std::int64_t columns_;
  DType dtype_;
  std::vector<std::byte> bytes_;
};

/// A layer's memory on one rank.
class RankLayer {
 public:
  RankLayer(const RankContext& context, const Layer& layer, std::uint64_t seed);

  const Layer& layer() const { return layer_; }
  Routing routing() const { return layer_.routing(rank_); }
  ConstMatrix x() { return x_.matrix(); }
  std::span<const std::byte> extra() const { return extra_; }
  Matrix out() { return out_.matrix(); }
  GuardedMatrix& out_memory() { return out_; }
  /// New rows, and an output that holds nothing of the last use.
  void use_seed(std::uint64_t seed);

  void check_plan(const Plan& plan) const;
  void check_rows(const ExpertRows& rows) const;
  void check_out();
  /// What the caller does between dispatch and combine.
  void run_experts(const Plan& plan, ConstMatrix rows, Matrix y) const;
  int rank() const { return rank_; }
  /// The way back of the rows of this use.
  support::BackwardReference backward() const {
    return {layer_.reference(seed_), ~seed_, layer_.gradient_factor};
  }

 private:
  const Layer& layer_;
  int rank_;
  std::uint64_t seed_ = 0;
  GuardedMatrix x_;
  GuardedMatrix out_;
  std::vector<std::byte> extra_;
};

/// Where the experts write their outputs, and where gradients of rows are.
enum class OutputPlace : std::uint8_t { window, dispatched_rows, plain };

/// Which of the backward operations follow combine.
enum class Backward : std::uint8_t {
  none,
  rows,     ///< both, without gradients of weights
  weights,  ///< both, with gradients of weights in the one that has them
};

struct LayerRun {
  OutputPlace y = OutputPlace::window;
  Backward backward = Backward::none;
  int uses = 1;                ///< of one plan, each with new rows
  std::uint64_t seed = 1;
  bool new_seed_per_use = true;
  bool check_bytes = true;     ///< counted = planned; only for calls that are alone
  std::uint64_t* out_hash = nullptr;  ///< of the last use, its gradients included
};

/// plan, dispatch, experts, combine; everything is checked against the oracle. Free window memory
/// is NaN between calls.
Task run_layer(RankContext& context, Exchange& exchange, const Layer& layer, LayerRun run);
/// The same from dispatch on, on a plan that exists.
Task use_plan(RankContext& context, Exchange& exchange, const Plan& plan, RankLayer& memory,
              LayerRun run);

/// The same from the rows of a dispatch on.
Task use_rows(RankContext& context, Exchange& exchange, const ExpertRows& rows, RankLayer& memory,
              LayerRun run);

/// Fixture of a case.
class Conformance : public ::testing::TestWithParam<Point> {
 protected:
  int num_ranks() const;
  /// A group at this point, with default wires.
  Group group(int num_experts, std::int64_t hidden = 19) const;
  /// `base` tokens more or less on each rank.
  std::vector<std::int64_t> ragged(std::int64_t base) const;
  ProgramOptions program() const;
  /// Runs the body on all ranks; a rank that fails, or a hang, fails the test.
  void run(const support::Body& body) const;
  /// run_layer on all ranks.
  void run(const Layer& layer, const LayerRun& how = {}) const;
};

}  // namespace ferry::conformance
