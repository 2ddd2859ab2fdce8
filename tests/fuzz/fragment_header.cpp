#include "fuzz/headers.hpp"

namespace ferry::fuzz {

void run(Input input) { check_header<wire::FragmentHeader>(input); }

std::vector<Seed> seeds() {
  return {{"sample", wire::test::encoded(wire::test::sample_fragment())},
          {"default", wire::test::encoded(wire::FragmentHeader())}};
}

}  // namespace ferry::fuzz
