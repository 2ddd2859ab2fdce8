// First 4 bytes: hidden (2), form, number of rows; then the payload of a fragment of sparse rows.

#include <algorithm>
#include <cstring>

#include "fuzz/fuzz.hpp"
#include "kernels/sparse_rows.hpp"
#include "wire/samples.hpp"

namespace ferry::fuzz {
namespace {

constexpr std::size_t kHeadBytes = 4;

struct Head {
  kernels::SparseShape shape{};
  kernels::Positions positions = kernels::Positions::coo;
  std::uint32_t num_rows = 0;
};

Head read_head(Input input) {
  std::uint16_t hidden = 0;
  std::memcpy(&hidden, input.data(), sizeof hidden);
  const auto form = std::to_integer<unsigned>(input[2]);
  // The largest stands for rows whose columns need 4 bytes; others stay small, for speed.
  const std::int64_t columns = hidden == 0xFFFF ? 70'000 : std::max<int>(hidden % 2048, 1);
  return {.shape = {.hidden = columns, .element_bytes = form / 4 % 2 == 0 ? 2U : 4U},
          .positions = static_cast<kernels::Positions>(form % 4 % 3),
          .num_rows = std::to_integer<std::uint32_t>(input[3]) % 8};
}

}  // namespace

void run(Input input) {
  if (input.size() < kHeadBytes) return;
  const Head head = read_head(input);
  const std::uint64_t row_bytes =
      static_cast<std::uint64_t>(head.shape.hidden) * head.shape.element_bytes;
  const auto expand = [&](Input payload, std::vector<std::byte>& rows) {
    rows.assign(head.num_rows * row_bytes, std::byte{0xAA});
    return kernels::expand_rows({.shape = head.shape,
                                 .positions = head.positions,
                                 .num_rows = head.num_rows,
                                 .payload = payload,
                                 .out = rows.data()});
  };
  const wire::test::ExactBytes payload(input.subspan(kHeadBytes));
  std::vector<std::byte> rows;
  if (!expand(payload.span(), rows) || head.num_rows == 0) return;
  std::vector<std::byte> again(2 * payload.span().size());  // without zeros there are more runs
  const std::uint64_t bytes = kernels::compress_rows({.shape = head.shape,
                                                      .positions = head.positions,
                                                      .num_rows = head.num_rows,
                                                      .rows = rows.data(),
                                                      .out = again});
  require(bytes != 0, "what was accepted is far larger when it is written again");
  std::vector<std::byte> twice;
  require(expand(std::span(again).first(bytes), twice), "what was written is refused");
  require(rows == twice, "what was written is other rows");
}

std::vector<Seed> seeds() {
  std::vector<Seed> made;
  const std::vector<std::string> names{"coo", "bitmask", "run_length"};
  for (std::size_t form = 0; form < 8; ++form) {
    if (form % 4 == 3) continue;
    std::vector<std::byte> head{std::byte{21}, std::byte{0}, static_cast<std::byte>(form),
                                std::byte{3}};
    const Head read = read_head(head);
    const std::size_t size = read.shape.element_bytes;
    std::vector<std::byte> rows(3 * 21 * size);
    for (const std::size_t column : {0U, 1U, 2U, 9U, 20U, 25U, 40U, 41U, 62U}) {
      rows[column * size] = std::byte{0x3C};
    }
    std::vector<std::byte> payload(rows.size());
    payload.resize(kernels::compress_rows({.shape = read.shape,
                                           .positions = read.positions,
                                           .num_rows = read.num_rows,
                                           .rows = rows.data(),
                                           .out = payload}));
    head.insert(head.end(), payload.begin(), payload.end());
    made.push_back({names[form % 4] + (size == 2 ? "_16" : "_32"), head});
  }
  return made;
}

}  // namespace ferry::fuzz
