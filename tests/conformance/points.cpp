// The matrix that conformance cases run over.

#include "conformance/points.hpp"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <stdexcept>

#include <fmt/format.h>

namespace ferry::conformance {

namespace {

/// Ranks per node in place of all topologies, for jobs of other sizes: FERRY_TEST_NODES=1+2.
std::optional<NamedTopology> only_topology() {
  const char* const text = std::getenv("FERRY_TEST_NODES");
  if (text == nullptr) return std::nullopt;
  NamedTopology topology{text, {}};
  std::istringstream sizes(text);
  for (std::string size; std::getline(sizes, size, '+');) {
    topology.node_sizes.push_back(std::stoi(size));
  }
  return topology;
}

bool is_chosen(const NamedTopology& topology, const std::vector<std::string>& names) {
  return only_topology() || std::ranges::find(names, topology.name) != names.end();
}

}  // namespace

std::vector<NamedTopology> all_topologies() {
  if (const auto only = only_topology()) return {*only};
  return {{"1x1", {1}},
          {"1x8", {8}},
          {"2x4", {4, 4}},
          {"4x2", {2, 2, 2, 2}},
          {"8x1", std::vector<int>(8, 1)},
          {"3+5", {3, 5}},
          {"1+2+4", {1, 2, 4}}};
}

NamedTopology topology_named(const std::string& name) {
  for (const NamedTopology& topology : all_topologies()) {
    if (topology.name == name) return topology;
  }
  throw std::logic_error("no topology is called " + name);
}

std::string to_string(const Mode& mode) {
  std::string text = fmt::format("{}_{}", to_string(mode.layout), to_string(mode.weights));
  if (mode.row_alignment != 1) text += fmt::format("_align{}", mode.row_alignment);
  if (mode.extra_bytes != 0) text += fmt::format("_extra{}", mode.extra_bytes);
  return text + (mode.row_sources ? "_sources" : "");
}

Group with_mode(Group group, const Mode& mode) {
  group.layout = mode.layout;
  group.weights = mode.weights;
  group.row_alignment = mode.row_alignment;
  group.extra_bytes = mode.extra_bytes;
  group.row_sources = mode.row_sources;
  return group;
}

Mode mode_of(const Group& group) {
  return {group.layout, group.weights, group.row_alignment, group.extra_bytes, group.row_sources};
}

std::string to_string(const Point& point) {
  std::string text =
      fmt::format("{}_{}_{}_{}", support::to_string(point.transport), to_string(point.strategy),
                  to_string(point.dtype), point.topology.name);
  if (point.mode != Mode{}) text += "_" + to_string(point.mode);
  return text;
}

std::ostream& operator<<(std::ostream& out, const Point& point) { return out << to_string(point); }

std::string name_of(const ::testing::TestParamInfo<Point>& info) {
  std::string name = to_string(info.param);
  std::replace(name.begin(), name.end(), '+', 'p');
  return name;
}

std::vector<Point> all_points() {
  std::vector<Point> points;
  for (const TransportKind transport : {TransportKind::threads, TransportKind::stepped}) {
    for (const Strategy strategy :
         {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather, Strategy::node_dedup}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const NamedTopology& topology : all_topologies()) {
          points.push_back({transport, strategy, dtype, topology});
        }
      }
    }
  }
  return points;
}

std::vector<Point> few_points(const std::vector<std::string>& topologies) {
  std::vector<Point> points = all_points();
  std::erase_if(points, [&](const Point& point) {
    return point.dtype != DType::bf16 || !is_chosen(point.topology, topologies);
  });
  return points;
}

std::vector<Mode> modes_of(Strategy strategy) {
  std::vector<Mode> modes{{Layout::expert_major, WeightMode::at_combine},
                          {Layout::expert_major, WeightMode::at_expert},
                          {Layout::expert_major, WeightMode::none}};
  if (strategy == Strategy::flat) return modes;
  modes.push_back({Layout::token_major, WeightMode::at_expert});
  modes.push_back({Layout::token_major, WeightMode::none});
  return modes;
}

std::vector<Point> mode_points(const std::vector<std::string>& topologies) {
  std::vector<Point> points;
  for (Point point : all_points()) {
    if (!is_chosen(point.topology, topologies) || point.dtype != DType::f32) continue;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      // Only kernels see dtypes, and all transports call the same: real threads need one of them.
      if (point.transport == TransportKind::threads && dtype != DType::bf16) continue;
      point.dtype = dtype;
      for (const Mode& mode : modes_of(point.strategy)) {
        point.mode = mode;
        points.push_back(point);
      }
    }
  }
  return points;
}

std::vector<Point> paired_points(const std::vector<std::string>& topologies) {
  std::vector<Point> points = mode_points(topologies);
  if (only_topology()) return points;
  std::erase_if(points, [&](const Point& point) {
    const std::vector<Mode> modes = modes_of(point.strategy);
    const auto turn = (std::ranges::find(modes, point.mode) - modes.begin()) +
                      static_cast<std::ptrdiff_t>(point.strategy) +
                      static_cast<std::ptrdiff_t>(point.dtype);
    const std::string& name = topologies[static_cast<std::size_t>(turn) % topologies.size()];
    return point.topology.name != name;
  });
  return points;
}

}  // namespace ferry::conformance
