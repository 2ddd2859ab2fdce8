// ferry info from the outside: what every machine must say of itself.

#include <sched.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tools/run_ferry.hpp"

namespace ferry::tools {
namespace {

TEST(InfoCommand, JsonDescribesTheMachineThatRunsIt) {
  const Outcome outcome = ferry("info --json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<nlohmann::json> objects = json_lines(outcome.out);
  ASSERT_EQ(objects.size(), 1U);
  const nlohmann::json& info = objects.front();
  EXPECT_EQ(info.at("schema"), "ferry.info/1");
  EXPECT_EQ("ferry " + info.at("version").get<std::string>() + "\n", ferry("--version").out);
  EXPECT_FALSE(info.at("cpu").at("simd_targets").empty());
  const nlohmann::json& topology = info.at("topology");
  EXPECT_EQ(topology.at("num_threads"), sysconf(_SC_NPROCESSORS_ONLN));
  EXPECT_GE(topology.at("num_threads"), topology.at("num_cores"));
  EXPECT_GE(topology.at("num_cores"), topology.at("num_sockets"));
  EXPECT_GE(topology.at("num_sockets"), 1);
  EXPECT_GE(topology.at("num_numa_nodes"), 1);
  EXPECT_GE(topology.at("num_allowed_threads"), 1);
  EXPECT_LE(topology.at("num_allowed_threads"), topology.at("num_threads"));
  EXPECT_GT(topology.at("memory_bytes"), 1 << 28);
  EXPECT_EQ(info.at("transports").at("threads").at("on"), true);
  EXPECT_EQ(info.at("parts").at("python").at("on"), false);
  EXPECT_EQ(info.at("parts").at("python").at("note"), "not in this build");
  EXPECT_TRUE(info.at("limits").contains("memlock_bytes"));
}

TEST(InfoCommand, SeesThatItMayUseFewerThreads) {
  const Outcome outcome = ferry("info --json");
  ASSERT_EQ(outcome.code, 0);
  if (json_lines(outcome.out).front().at("topology").at("num_allowed_threads") < 2) {
    GTEST_SKIP() << "needs two hardware threads";
  }
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &all)) ++cpu;
  CPU_SET(cpu, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const Outcome bound = ferry("info --json");
  sched_setaffinity(0, sizeof(all), &all);
  EXPECT_EQ(json_lines(bound.out).front().at("topology").at("num_allowed_threads"), 1);
}

TEST(InfoCommand, TextSaysWhatIsOnAndOff) {
  const Outcome outcome = ferry("info");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* text : {"ferry 0.", "CPU ", "SIMD targets", "topology", "socket", "NUMA node",
                           "memory", "transports", "threads          on (",
                           "mpi              off "
                           "(not in this build)",
                           "python           off (not in this build)", "memlock"}) {
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text << "\n" << outcome.out;
  }
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(ferry("info --nodes 2").code, 2);
}

}  // namespace
}  // namespace ferry::tools
