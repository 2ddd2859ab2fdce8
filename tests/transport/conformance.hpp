#pragma once
// The settings that the conformance suite runs over.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "ferry/error.hpp"
#include "transport/harness.hpp"

namespace ferry::testing {

class Conformance : public ::testing::TestWithParam<Setting> {};

inline std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  std::string shape = info.param.topology.describe();
  std::replace_if(
      shape.begin(), shape.end(), [](char c) { return c == ' ' || c == '+'; }, '_');
  return to_string(info.param.kind) + "_" + shape + "_seed" + std::to_string(info.param.seed);
}

inline std::vector<Setting> all_settings() {
  std::vector<Setting> settings;
  for (const Topology& topology : {Topology::uniform(2, 1), Topology::uniform(2, 2),
                                   Topology::from_sizes({3, 1}), Topology::uniform(3, 2)}) {
    settings.push_back({Kind::threads, topology});
    settings.push_back({Kind::paced, topology});
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      settings.push_back({Kind::stepped, topology, seed});
    }
  }
  return settings;
}

template <typename Call>
void expect_refused(ErrorCode code, const std::string& part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one that says: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

inline std::vector<int> remote_ranks(const Transport& transport) {
  std::vector<int> ranks;
  for (int rank = 0; rank < transport.topology().num_ranks(); ++rank) {
    if (!transport.topology().same_node(rank, transport.rank())) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace ferry::testing
