// ferry bench as ranks of an MPI job: started for real with the launcher of each MPI.

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tools/ferry_folder.hpp"
#include "tools/run_ferry.hpp"
#include "tools/trace_files.hpp"

namespace ferry::bench {
namespace {

using Json = nlohmann::json;
using tools::json_lines;
using tools::Outcome;

struct Mpi {
  const char* name;
  const char* launcher;
  const char* flags;
  const char* version;  ///< how its name begins in the results
};
constexpr Mpi kMpis[] = {
    {"openmpi", "mpirun.openmpi", "--oversubscribe --bind-to none --mca mpi_yield_when_idle 1",
     "Open MPI v"},
    {"mpich", "mpiexec.mpich", "", "MPICH "}};

const std::string kSmall = "bench --tokens 20 --hidden 96 --experts 8 --topk 3 --repeat 2 ";

/// Lines of standard error that the command wrote; a launcher may add lines of its own.
std::vector<std::string> told(const Outcome& outcome) {
  std::vector<std::string> lines;
  std::istringstream text(outcome.err);
  for (std::string line; std::getline(text, line);) {
    if (line.rfind("ferry: ", 0) == 0) lines.push_back(line);
  }
  return lines;
}

class MpiBench : public testing::TestWithParam<Mpi> {
 protected:
  void SetUp() override {
    const Mpi& mpi = GetParam();
    const std::string find = fmt::format("command -v {} >/dev/null", mpi.launcher);
    if (std::system(find.c_str()) != 0) GTEST_SKIP() << mpi.launcher << " is not installed";
    const std::string module = fmt::format("{}/ferry_mpi_{}.so", FERRY_MODULES, mpi.name);
    if (!std::filesystem::exists(module)) GTEST_SKIP() << "this build has no " << module;
  }
  /// What starts so many ranks, before the program.
  static std::string launch(int ranks, const std::string& variables) {
    const Mpi& mpi = GetParam();
    return fmt::format(
        "{} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 100 {} {} "
        "-n {}",
        variables, mpi.launcher, mpi.flags, ranks);
  }
  static Outcome run(int ranks, const std::string& arguments, const std::string& variables = "") {
    return tools::ferry(arguments, launch(ranks, variables));
  }
  /// One line from one rank, and that code.
  static void expect_told_once(const Outcome& outcome, int code, const std::string& text) {
    EXPECT_EQ(outcome.code, code) << outcome.err;
    const std::vector<std::string> lines = told(outcome);
    ASSERT_EQ(lines.size(), 1U) << outcome.err;
    EXPECT_NE(lines.front().find(text), std::string::npos) << lines.front();
  }
};

void expect_baseline(const Json& object) {
  for (const std::string name : {"alltoallv", "alltoallv_rank_rows"}) {
    for (const char* const part : {"_counts_us", "_dispatch_us", "_combine_us"}) {
      const Json& spread = object.at(name + part);
      EXPECT_GT(spread.at("p10"), 0) << name << part;
      EXPECT_LE(spread.at("p10"), spread.at("median"));
      EXPECT_LE(spread.at("median"), spread.at("p90"));
    }
    EXPECT_GT(object.at("speedup_vs_" + name), 0);
    EXPECT_GT(object.at("speedup_vs_" + name + "_in_two"), 0);
    EXPECT_GT(object.at("speedup_vs_" + name + "_replay"), 0);
    // At least the expert rows and y.
    EXPECT_GT(object.at(name + "_peak_bytes"), 2 * object.at("logical_bytes_dispatch").get<int>());
  }
  EXPECT_GE(object.at("peak_bytes"), object.at("pool_bytes").get<std::uint64_t>());
}

TEST_P(MpiBench, MeasuresAndVerifiesAnyNumberOfRanksOnce) {
  for (const int ranks : {1, 2, 4}) {
    const Outcome outcome =
        run(ranks, kSmall + "--strategy flat,node_dedup --baseline alltoallv --json");
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const std::vector<Json> objects = json_lines(outcome.out);
    ASSERT_EQ(objects.size(), 2U) << outcome.out;
    for (const Json& object : objects) {
      EXPECT_EQ(object.at("verified"), true);
      EXPECT_EQ(object.at("transport"), "mpi");
      EXPECT_EQ(object.at("mpi").get<std::string>().rfind(GetParam().version, 0), 0U)
          << object.at("mpi");
      EXPECT_EQ(object.at("one_clock"), true);
      EXPECT_EQ(object.at("num_nodes"), 1);
      EXPECT_EQ(object.at("num_ranks"), ranks);
      EXPECT_EQ(object.at("num_tokens"), 20 * ranks);
      EXPECT_EQ(object.at("logical_bytes_dispatch"), 20 * ranks * 3 * 96 * 2);
      EXPECT_FALSE(object.contains("link_utilisation"));
      expect_baseline(object);
    }
  }
}

TEST_P(MpiBench, VirtualNodesAndTheTable) {
  const Outcome outcome = run(4, kSmall + "--nodes 2 --baseline alltoallv --wire combine=f32");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* text :
       {"2 nodes, 4 ranks", GetParam().version, "flat ", "rank_dedup ", "node_gather ",
        "node_dedup ", "alltoallv ", "alltoallv_rank_rows ", "MB peak of ours", "Why:  "}) {
    const auto first = outcome.out.find(text);
    EXPECT_NE(first, std::string::npos) << text << "\n" << outcome.out;
  }
  EXPECT_EQ(outcome.out.find("Why:  "), outcome.out.rfind("Why:  ")) << "printed more than once";
}

TEST_P(MpiBench, OneMessageOfTheSameBytesIsMeasuredWhereThereAreRails) {
  const std::string with_rails = kSmall + "--strategy flat,node_dedup --baseline rail_message ";
  const Outcome outcome = run(4, with_rails + "--nodes 2 --json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> objects = json_lines(outcome.out);
  ASSERT_EQ(objects.size(), 2U) << outcome.out;
  for (const Json& object : objects) {
    EXPECT_GT(object.at("rail_message_us").at("median"), 0);
    EXPECT_GT(object.at("vs_rail_message"), 0);
    EXPECT_GT(object.at("vs_rail_message_in_two"), 0);
  }
  EXPECT_NE(run(4, with_rails + "--nodes 2").out.find("ours / one message per node"),
            std::string::npos);
  const Outcome one_node = run(2, with_rails + "--json");
  ASSERT_EQ(one_node.code, 0) << one_node.err;
  EXPECT_FALSE(json_lines(one_node.out).at(0).contains("rail_message_us"));
}

TEST_P(MpiBench, ALabSaysWhatItsLinksCarry) {
  const std::string two_nodes = kSmall + "--nodes 2 --strategy node_dedup --json";
  const std::string rate = "FERRY_LAB_LINK_RATE=1e9";
  const Outcome outcome = run(2, two_nodes, rate);
  const Outcome burst = run(2, two_nodes, rate + " FERRY_LAB_LINK_BURST=1000000000");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(burst.code, 0) << burst.err;
  const Json object = json_lines(outcome.out).at(0);
  EXPECT_EQ(object.at("num_nodes"), 2);
  EXPECT_EQ(object.at("paced"), false);
  EXPECT_EQ(object.at("link_bits_per_s"), 1e9);
  EXPECT_EQ(object.at("burst_bytes"), 0);
  EXPECT_GT(object.at("link_utilisation"), 0);
  EXPECT_EQ(json_lines(burst.out).at(0).at("burst_bytes"), 1000000000);
  EXPECT_EQ(json_lines(burst.out).at(0).at("link_utilisation"), 0);
  expect_told_once(run(2, two_nodes, "FERRY_LAB_LINK_RATE=fast"), 2, "FERRY_LAB_LINK_RATE=fast");
}

TEST_P(MpiBench, TheBaselineTakesAnyRouting) {
  // Fewer experts than ranks, ranks without tokens, and rows of an odd length.
  EXPECT_EQ(run(4,
                "bench --tokens 0,7,33,0 --hidden 7 --experts 3 --topk 2 --repeat 1 --dtype f32 "
                "--strategy flat --baseline alltoallv")
                .code,
            0);
  // Slots without an expert, and tokens that name an expert twice.
  const tools::TemporaryDirectory directory;
  directory.write(
      "meta.json",
      R"({"model": "odd", "num_experts": 4, "hidden": 16, "sequence_lengths": [2, 2]})");
  std::string experts;
  for (const int expert : {1, 1, 3, -1, -1, -1, 2, 0, 2, 3, -1, 3}) {
    experts += static_cast<char>(expert);
  }
  directory.write("topk_idx.npy", tools::npy(tools::npy_header("|i1", "(4, 1, 3)"), experts));
  const Outcome outcome = run(2,
                              "bench --repeat 1 --strategy rank_dedup --baseline alltoallv "
                              "--trace '" +
                                  directory.path().string() + "'");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST_P(MpiBench, AFaultOfAnyRankIsToldOnceAndEndsAllWith3) {
  const std::string both = kSmall + "--strategy flat --baseline alltoallv --json --inject-fault ";
  const Outcome baseline = run(2, both + "baseline");
  expect_told_once(baseline, 3, "verification failed: alltoallv, repeat 1: rank ");
  ASSERT_EQ(json_lines(baseline.out).size(), 1U);
  EXPECT_EQ(json_lines(baseline.out).at(0).at("strategy"), nullptr);
  const Outcome ours = run(2, both + "out");
  expect_told_once(ours, 3, "verification failed: flat, repeat 1: rank ");
  ASSERT_EQ(json_lines(ours.out).size(), 1U);
  EXPECT_EQ(json_lines(ours.out).at(0).at("strategy"), "flat");
  EXPECT_EQ(json_lines(ours.out).at(0).at("verified"), false);
  // All tokens are on rank 1, so that it is the only one that can notice.
  expect_told_once(run(2,
                       "bench --tokens 0,9 --hidden 8 --experts 4 --topk 2 --repeat 1 "
                       "--strategy flat --inject-fault out"),
                   3, "rank 1: combined row 0");
}

TEST_P(MpiBench, AWrongStartIsToldOnceAndEndsWith2) {
  expect_told_once(run(4, kSmall + "--nodes 3"), 2, "started 4; fix: make their product 4");
  expect_told_once(run(2, kSmall + "--link-rate 1gbit"), 2, "--link-rate under ");
  expect_told_once(run(2, kSmall + "--no-such-flag"), 2, "--no-such-flag");
  const std::string other = GetParam().name == std::string("mpich") ? "openmpi" : "mpich";
  expect_told_once(run(2, kSmall + "--mpi " + other), 2, "is of the other MPI");
}

TEST_P(MpiBench, ATraceThatComesWithSomeRanksOnlyIsToldOnceAndEndsWith4) {
  const tools::FerryFolder whole;
  whole.add_trace();
  const tools::FerryFolder alone;
  const std::string small = "bench --hidden 16 --repeat 1 --strategy flat";
  const std::string both = fmt::format("{0} : -n 1 '{1}' {0}", small, alone.program().string());
  const std::string variables = "FERRY_MODULE_PATH='" FERRY_MODULES "'";
  expect_told_once(tools::ferry_at(whole.program(), both, launch(1, variables)), 4,
                   "rank 1 has routing uniform, rank 0 trace");
  const Outcome same = tools::ferry_at(whole.program(), small + " --json", launch(2, variables));
  ASSERT_EQ(same.code, 0) << same.err;
  EXPECT_EQ(json_lines(same.out).at(0).at("trace"), whole.trace().string());
}

TEST_P(MpiBench, OffRunsEveryProcessOnItsOwn) {
  // A file for each process: a launcher may mix what several write to standard output in one line.
  const tools::TemporaryDirectory files;
  const std::string own = fmt::format(" sh -c 'exec \"$@\" > {}/$$' sh", files.path().string());
  const Outcome outcome =
      tools::ferry(kSmall + "--mpi off --nodes 1 --ranks-per-node 1 --strategy flat --json",
                   launch(2, "") + own);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  int processes = 0;
  for (const auto& file : std::filesystem::directory_iterator(files.path())) {
    const std::vector<Json> objects = json_lines(tools::content_of(file.path()));
    ASSERT_EQ(objects.size(), 1U);
    EXPECT_EQ(objects.front().at("transport"), "threads");
    ++processes;
  }
  EXPECT_EQ(processes, 2);
}

INSTANTIATE_TEST_SUITE_P(Launchers, MpiBench, testing::ValuesIn(kMpis),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(NoLauncher, TheBaselineNeedsOne) {
  const Outcome outcome = tools::ferry(kSmall + "--nodes 1 --baseline alltoallv");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_NE(outcome.err.find("start it with `mpirun -n 4 ferry bench"), std::string::npos)
      << outcome.err;
  EXPECT_EQ(tools::ferry(kSmall + "--mpi openmpi").code, 2);
}

}  // namespace
}  // namespace ferry::bench
