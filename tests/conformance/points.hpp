#pragma once
// The matrix that conformance cases run over: transports, strategies, dtypes, shapes of the group
// and modes, and the names of its points.

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/rank_program.hpp"
#include "support/reference.hpp"

namespace ferry::conformance {

using support::Group;
using support::TransportKind;

/// A shape of the group, by name: "2x4", "3+5".
struct NamedTopology {
  std::string name;
  std::vector<int> node_sizes;
  Topology topology() const { return Topology::from_sizes(node_sizes); }
};
/// The shapes that every case runs on.
std::vector<NamedTopology> all_topologies();
NamedTopology topology_named(const std::string& name);

/// What the rows are and who applies weights. The defaults are those of ExchangeOptions.
struct Mode {
  Layout layout = Layout::expert_major;
  WeightMode weights = WeightMode::at_combine;
  std::int64_t row_alignment = 1;
  std::int64_t extra_bytes = 0;
  bool row_sources = false;
  bool operator==(const Mode&) const = default;
};
std::string to_string(const Mode& mode);
/// The group with another mode.
Group with_mode(Group group, const Mode& mode);
Mode mode_of(const Group& group);

/// The point of the matrix that a case runs at.
struct Point {
  TransportKind transport = TransportKind::threads;
  Strategy strategy = Strategy::node_dedup;
  DType dtype = DType::f32;
  NamedTopology topology;
  Mode mode{};
};
std::string to_string(const Point& point);
std::ostream& operator<<(std::ostream& out, const Point& point);
/// {threads, stepped} x strategies x {f32, bf16} x topologies.
std::vector<Point> all_points();
/// The same with fewer topologies and one dtype, for tests of behaviour rather than numbers.
std::vector<Point> few_points(const std::vector<std::string>& topologies);
/// Every pair of layout and weight mode that a strategy allows.
std::vector<Mode> modes_of(Strategy strategy);
/// Strategies x their modes, stepped with all dtypes, on threads with bf16.
std::vector<Point> mode_points(const std::vector<std::string>& topologies);
/// The same with each (mode, dtype) on one of the topologies only, so that every pair of two of
/// mode, dtype and topology is still there.
std::vector<Point> paired_points(const std::vector<std::string>& topologies);
std::string name_of(const ::testing::TestParamInfo<Point>& info);

}  // namespace ferry::conformance
