// First byte: the number of nodes, the largest stands for more than there can be. Then a row
// summary and whatever follows it.

#include <algorithm>
#include <limits>

#include "fuzz/fuzz.hpp"
#include "wire/headers.hpp"

namespace ferry::fuzz {

void run(Input input) {
  if (input.empty()) return;
  const auto stated = std::to_integer<std::size_t>(input[0]);
  const std::size_t num_nodes = stated == 255 ? std::numeric_limits<std::size_t>::max() : stated;
  const Input bytes = input.subspan(1);
  Input rest = bytes;
  wire::RowSummary summary;
  if (const auto error = wire::decode_row_summary(rest, num_nodes, summary)) {
    require(!error->empty(), "an error without a text");
    require(rest.data() == bytes.data() && rest.size() == bytes.size(), "bytes were taken");
    require(summary == wire::RowSummary{}, "a refused summary was written");
    return;
  }
  require(summary.rows_to_node.size() == num_nodes, "another number of nodes");
  std::vector<std::byte> again;
  wire::encode_row_summary(summary, again);
  require(std::ranges::equal(again, bytes.first(bytes.size() - rest.size())),
          "what was accepted is encoded in another way");
}

std::vector<Seed> seeds() {
  const auto seed = [](const std::string& name, const wire::RowSummary& summary) {
    std::vector<std::byte> bytes{static_cast<std::byte>(summary.rows_to_node.size())};
    wire::encode_row_summary(summary, bytes);
    return Seed{name, bytes};
  };
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  return {seed("no_nodes", {}), seed("one_node", {{{0, 1, 127}}}),
          seed("three_nodes", {{{4096, 300, 20}, {128, 16384, 0}, {kMost, kMost - 1, 1}}})};
}

}  // namespace ferry::fuzz
