// Rows per (target node, strategy) as varints, node by node. The number of nodes is not on the
// wire: the receiver knows it.

#include <utility>

#include <fmt/format.h>

#include "wire/bytes.hpp"
#include "wire/headers.hpp"

namespace ferry::wire {

namespace {
constexpr std::size_t kStrategies = std::tuple_size_v<std::array<std::uint64_t, 3>>;
}  // namespace

void encode_row_summary(const RowSummary& summary, std::vector<std::byte>& out) {
  std::size_t bytes = 0;
  for (const auto& rows : summary.rows_to_node) {
    for (const std::uint64_t value : rows) bytes += varint_bytes(value);
  }
  const std::size_t before = out.size();
  out.resize(before + bytes);
  std::byte* at = out.data() + before;
  for (const auto& rows : summary.rows_to_node) {
    for (const std::uint64_t value : rows) at = store_varint(at, value);
  }
}

std::optional<std::string> decode_row_summary(Bytes& bytes, std::size_t num_nodes,
                                              RowSummary& out) {
  out = {};
  // A number takes a byte at least, so this bounds the allocation. Divided, so as not to overflow.
  if (bytes.size() / kStrategies < num_nodes) {
    return fmt::format("row summary: {} bytes are left; expected at least {} for each of {} nodes",
                       bytes.size(), kStrategies, num_nodes);
  }
  Bytes rest = bytes;
  RowSummary summary;
  summary.rows_to_node.resize(num_nodes);
  for (std::size_t node = 0; node < num_nodes; ++node) {
    for (std::size_t i = 0; i < kStrategies; ++i) {
      if (take_varint(rest, summary.rows_to_node[node][i])) continue;
      return fmt::format(
          "row summary: rows_to_node[{},{}] at byte {} is not a varint; expected at "
          "most {} bytes, in the shortest form, below 2^64",
          node, i, bytes.size() - rest.size(), kMaxVarintBytes);
    }
  }
  out = std::move(summary);
  bytes = rest;
  return std::nullopt;
}

}  // namespace ferry::wire
