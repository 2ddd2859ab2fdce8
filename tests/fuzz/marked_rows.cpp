// First 3 bytes: hidden (2) and the number of rows; then the payload of a fragment of quantised
// rows, some of which are longer.

#include <algorithm>
#include <cstring>

#include "fuzz/fuzz.hpp"
#include "kernels/row_kernels.hpp"
#include "wire/samples.hpp"

namespace ferry::fuzz {
namespace {

constexpr std::size_t kHeadBytes = 3;
constexpr kernels::RowFormat kWire{WireFormat::int8, kDefaultBlockColumns};
constexpr kernels::RowFormat kEscalated{WireFormat::bf16, 0};

}  // namespace

void run(Input input) {
  if (input.size() < kHeadBytes) return;
  std::uint16_t hidden = 0;
  std::memcpy(&hidden, input.data(), sizeof hidden);
  const wire::test::ExactBytes payload(input.subspan(kHeadBytes));
  const kernels::MarkedRowsJob job{.wire = kWire,
                                   .escalated = kEscalated,
                                   .hidden = std::max<int>(hidden, 1),
                                   .num_rows = std::to_integer<std::uint32_t>(input[2]),
                                   .payload = payload.span()};
  std::vector<kernels::MarkedRow> rows;
  if (!kernels::find_marked_rows(job, rows)) return;
  require(rows.size() == job.num_rows, "another number of rows");
  const std::byte* next = job.payload.data();
  for (const kernels::MarkedRow& row : rows) {
    require(row.row == next, "rows stand one behind the other");
    next += (row.escalated ? kEscalated : kWire).row_bytes(job.hidden);
  }
  require(std::ranges::any_of(rows, &kernels::MarkedRow::escalated), "such a fragment is plain");
  require(next + (job.num_rows + 7) / 8 == job.payload.data() + job.payload.size(),
          "a bit for each row, and nothing behind them");
}

std::vector<Seed> seeds() {
  constexpr std::uint8_t kHidden = 5;
  const auto seed = [](const std::string& name, std::uint8_t num_rows, std::uint8_t marks) {
    Seed made{name, {std::byte{kHidden}, std::byte{0}, std::byte{num_rows}}};
    for (int row = 0; row < num_rows; ++row) {
      const bool escalated = (marks >> row & 1) != 0;
      made.bytes.resize(made.bytes.size() + (escalated ? kEscalated : kWire).row_bytes(kHidden));
    }
    made.bytes.push_back(std::byte{marks});
    return made;
  };
  return {seed("one", 1, 1), seed("some", 7, 0b0100101), seed("all", 8, 0xFF)};
}

}  // namespace ferry::fuzz
