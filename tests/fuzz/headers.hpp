#pragma once
// What holds for every header: a decoder refuses with a text and touches nothing, or what it
// accepts is written again byte for byte.

#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "kernels/row_kernels.hpp"
#include "wire/samples.hpp"

namespace ferry::fuzz {

template <typename Header>
void check_decoder(Input bytes) {
  const Header untouched{};
  Header out = untouched;
  if (const auto error = wire::decode(bytes, out)) {
    require(!error->empty(), "an error without a text");
    require(out == untouched, "a refused header was written: " + *error);
    return;
  }
  const std::vector<std::byte> again = wire::test::encoded(out);
  require(std::ranges::equal(again, bytes), "what was accepted is encoded in another way");
}

/// As the bytes are, and with the checksum that they should have: no fuzzer guesses that.
template <typename Header>
void check_header(Input input) {
  check_decoder<Header>(input);
  std::uint32_t crc = 0;
  if (input.size() < sizeof crc) return;
  std::vector<std::byte> sealed(input.begin(), input.end());
  const std::span front = std::span(sealed).first(sealed.size() - sizeof crc);
  crc = kernels::crc32c(front);
  std::memcpy(sealed.data() + front.size(), &crc, sizeof crc);
  check_decoder<Header>(wire::test::ExactBytes(sealed).span());
}

}  // namespace ferry::fuzz
