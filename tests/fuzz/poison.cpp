#include "fuzz/headers.hpp"

namespace ferry::fuzz {

void run(Input input) { check_header<wire::PoisonMessage>(input); }

std::vector<Seed> seeds() {
  return {{"sample", wire::test::encoded(wire::test::sample_poison())},
          {"default", wire::test::encoded(wire::PoisonMessage())}};
}

}  // namespace ferry::fuzz
