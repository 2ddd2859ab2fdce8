#include "fuzz/headers.hpp"

namespace ferry::fuzz {

void run(Input input) { check_header<wire::GrantMessage>(input); }

std::vector<Seed> seeds() {
  return {{"sample", wire::test::encoded(wire::test::sample_grant())},
          {"default", wire::test::encoded(wire::GrantMessage())}};
}

}  // namespace ferry::fuzz
