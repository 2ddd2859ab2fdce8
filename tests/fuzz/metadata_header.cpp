#include "fuzz/headers.hpp"

namespace ferry::fuzz {

void run(Input input) { check_header<wire::MetadataHeader>(input); }

std::vector<Seed> seeds() {
  return {{"sample", wire::test::encoded(wire::test::sample_metadata())},
          {"default", wire::test::encoded(wire::MetadataHeader())}};
}

}  // namespace ferry::fuzz
