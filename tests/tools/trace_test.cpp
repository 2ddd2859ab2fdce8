// Traces on disk: what is read, what is refused, and how sequences are shared out to ranks.

#include "common/trace.hpp"

#include <numeric>

#include <gtest/gtest.h>

#include "common/failures.hpp"
#include "tools/trace_files.hpp"

namespace ferry::tools {
namespace {

std::string load_refusal(const TemporaryDirectory& directory) {
  try {
    Trace::load(directory.path()).layer(0);
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Trace, ReadsALayer) {
  const TemporaryDirectory directory;
  write_small_trace(directory);
  const Trace trace = Trace::load(directory.path());
  EXPECT_EQ(trace.info().model, "tiny");
  EXPECT_EQ(trace.info().num_experts, 4);
  EXPECT_EQ(trace.info().hidden, 16);
  EXPECT_EQ(trace.info().num_layers, 2);
  const TraceLayer layer = trace.layer(1);
  EXPECT_EQ(layer.topk_idx, (std::vector<std::int32_t>{2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3, 0}));
  EXPECT_TRUE(layer.topk_weights.empty());
  EXPECT_THROW(trace.layer(2), UsageError);
}

TEST(Trace, RefusesWhatContradictsItself) {
  const struct {
    const char* meta;
    const char* why;
  } cases[] = {
      {R"({"num_experts": 3, "sequence_lengths": [6]})", "is not an expert; allowed: -1 (none) or"},
      {R"({"sequence_lengths": [6]})", "has no num_experts"},
      {R"({"num_experts": 4, "sequence_lengths": [5]})", "add up to the 6 tokens"},
      {R"({"num_experts": 4, "sequence_lengths": [7, -1]})", "add up to the 6 tokens"},
      {R"({"num_experts": "four"})", "num_experts = \"four\""},
      {R"({"num_experts": 4, "hidden": 0})", "hidden = 0"},
      {"[1, 2", "is not a JSON object"},
  };
  for (const auto& one : cases) {
    const TemporaryDirectory directory;
    write_small_trace(directory);
    directory.write("meta.json", one.meta);
    const std::string text = load_refusal(directory);
    EXPECT_NE(text.find(one.why), std::string::npos) << text;
  }
}

TEST(Trace, RefusesWrongArrays) {
  const TemporaryDirectory directory;
  write_small_trace(directory);
  directory.write("topk_weights.npy", npy(npy_header("<f4", "(6, 2, 1)"), std::string(48, '\0')));
  EXPECT_NE(load_refusal(directory).find("allowed: float32 of the shape"), std::string::npos);
  directory.write("topk_weights.npy", npy(npy_header("<f4", "(6, 2, 2)"), std::string(96, '\xFF')));
  EXPECT_NE(load_refusal(directory).find("is not a finite number"), std::string::npos);
  directory.write("topk_idx.npy", npy(npy_header("|u1", "(12, 2)"), std::string(24, '\0')));
  EXPECT_NE(load_refusal(directory).find("[num_tokens, num_layers, num_topk]"), std::string::npos);
}

TEST(SplitSequences, GivesEveryTokenToOneRankInWholeSequences) {
  const std::vector<std::int64_t> lengths = {64, 63, 0, 73, 65, 57, 61, 59, 60, 1, 200, 5};
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  for (const std::size_t num_ranks : {1U, 2U, 3U, 8U, 40U}) {
    const auto shares = split_sequences(lengths, std::vector<std::int64_t>(num_ranks, -1));
    ASSERT_EQ(shares.size(), num_ranks);
    std::int64_t next = 0;
    for (const TokenShare& share : shares) {
      EXPECT_FALSE(share.cut);
      if (share.num_tokens == 0) continue;
      EXPECT_EQ(share.first_token, next);
      next += share.num_tokens;
      // A rank ends where a sequence ends.
      std::int64_t end = 0;
      bool at_end = false;
      for (const std::int64_t length : lengths) at_end = at_end || (end += length) == next;
      EXPECT_TRUE(at_end) << next;
    }
    EXPECT_EQ(next, total);
  }
}

TEST(SplitSequences, SaysWhenALimitCutsASequence) {
  const std::vector<std::int64_t> lengths = {10, 10, 10, 10};
  const auto shares = split_sequences(lengths, {10, 15});
  EXPECT_EQ(shares[0].num_tokens, 10);
  EXPECT_FALSE(shares[0].cut);
  EXPECT_EQ(shares[1].first_token, 20);
  EXPECT_EQ(shares[1].num_tokens, 15);
  EXPECT_TRUE(shares[1].cut);
  EXPECT_EQ(split_sequences(lengths, {0, 100})[0].num_tokens, 0);
}

}  // namespace
}  // namespace ferry::tools
