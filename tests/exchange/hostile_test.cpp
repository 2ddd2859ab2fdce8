// A table of what a network can do to each type of message: every rank ends with an error that
// names the sender and the field, or, where nothing was lost, as if it had not happened.

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/messages.hpp"
#include "exchange/rank_calls.hpp"

namespace ferry::testing {
namespace {

using wire::MessageType;

constexpr int kSource = 2;  ///< whose message to rank 0 is changed; ranks 0 and 1 share a node
constexpr std::uint64_t kMetadataLimit = 4096;
constexpr std::array kTwoUses{Call::plan, Call::dispatch, Call::combine, Call::dispatch,
                              Call::combine};

using Fault = std::function<std::vector<Outgoing>(Outgoing)>;

/// What happens to the first message of a type, and what all ranks say of it.
struct Row {
  std::string fault;
  MessageType type;
  Fault change;
  std::string words;  ///< empty: nothing is lost, and all calls end well
};

Fault resize(std::ptrdiff_t by) {
  return [by](Outgoing message) {
    message.bytes.resize(message.bytes.size() + static_cast<std::size_t>(by));
    return std::vector{std::move(message)};
  };
}

Fault resize_to(std::size_t bytes) {
  return [bytes](Outgoing message) {
    message.bytes.resize(bytes);
    return std::vector{std::move(message)};
  };
}

Fault flip(std::size_t at) {
  return [at](Outgoing message) {
    message.bytes.at(at) ^= std::byte{0x10};
    return std::vector{std::move(message)};
  };
}

Fault set_and_reseal(std::size_t at, int value) {
  return [at, value](Outgoing message) {
    message.bytes.at(at) = static_cast<std::byte>(value);
    reseal(message);
    return std::vector{std::move(message)};
  };
}

Fault send_as(MessageKind kind) {
  return [kind](Outgoing message) {
    message.kind = kind;
    return std::vector{std::move(message)};
  };
}

std::vector<Outgoing> twice(Outgoing message) { return {message, message}; }

std::vector<Row> truncated() {
  return {
      {"cut inside its header", MessageType::fragment, resize_to(10),
       "fragment header: size is 10 bytes; expected 72"},
      {"cut inside its header", MessageType::metadata, resize_to(100),
       "metadata header: size is 100 bytes; expected 140"},
      {"cut inside its header", MessageType::grant, resize_to(10),
       "grant message: size is 10 bytes; expected 36"},
      {"cut inside its header", MessageType::poison, resize_to(43),
       "poison message: size is 43 bytes; expected 44..1068"},
      {"empty", MessageType::fragment, resize_to(0), "fragment header: size is 0 bytes"},
      {"empty", MessageType::metadata, resize_to(0), "metadata header: size is 0 bytes"},
      {"empty", MessageType::grant, resize_to(0), "grant message: size is 0 bytes"},
      {"empty", MessageType::poison, resize_to(0), "grant message: size is 0 bytes"},
      {"one byte too short", MessageType::fragment, resize(-1),
       "payload_bytes is 128, but 127 bytes came"},
      {"one byte too short", MessageType::metadata, resize(-1),
       "metadata of rank 2: body_bytes is"},
      {"one byte too short", MessageType::grant, resize(-1),
       "grant message: size is 35 bytes; expected 36"},
      {"one byte too short", MessageType::poison, resize(-1), "poison message: header_crc is"},
  };
}

std::vector<Row> oversized() {
  return {
      {"one byte too long", MessageType::fragment, resize(1),
       "payload_bytes is 128, but 129 bytes came"},
      {"one byte too long", MessageType::metadata, resize(1), "metadata of rank 2: body_bytes is"},
      {"one byte too long", MessageType::grant, resize(1),
       "grant message: size is 37 bytes; expected 36"},
      {"one byte too long", MessageType::poison, resize(1), "poison message: header_crc is"},
      {"beyond the limit", MessageType::fragment, resize(1 << 20),
       "its size is more than the 1024 bytes of a fragment"},
      {"beyond the limit", MessageType::metadata, resize(1 << 20),
       "sent a metadata message of 104"},
      {"beyond the limit", MessageType::grant, resize(1 << 20), "sent a control message of 104"},
      {"beyond the limit", MessageType::poison, resize(1 << 20), "sent a control message of 104"},
  };
}

std::vector<Row> flipped() {
  return {
      {"a bit of its header", MessageType::fragment, flip(20), "fragment header: header_crc is"},
      {"a bit of its header", MessageType::metadata, flip(60), "metadata header: header_crc is"},
      {"a bit of its header", MessageType::grant, flip(24), "grant message: header_crc is"},
      {"a bit of its header", MessageType::poison, flip(20), "poison message: header_crc is"},
      {"a bit of its checksum", MessageType::fragment, flip(71), "fragment header: header_crc is"},
      {"a bit of its magic", MessageType::metadata, flip(1), "metadata header: magic is 0x"},
      {"a bit of its payload", MessageType::fragment, flip(wire::kFragmentHeaderBytes + 77),
       "payload_crc of fragment 0 of dispatch"},
      {"a bit of its body", MessageType::metadata, flip(wire::kMetadataHeaderBytes + 3),
       "metadata of rank 2: body_crc does not fit its bytes"},
      {"a bit of its text", MessageType::poison, flip(41), "poison message: header_crc is"},
  };
}

std::vector<Row> foreign() {
  std::vector<Row> rows;
  const auto add = [&rows](MessageType type, const std::string& name, std::size_t generation_at) {
    rows.push_back({"of another version", type, set_and_reseal(kVersionAt, 2),
                    name + ": version is 2; expected 1; fix: run one version of Ferry"});
    rows.push_back({"of another program", type, set_and_reseal(0, 'X'), name + ": magic is 0x"});
    rows.push_back({"of another group", type, set_and_reseal(generation_at, 7),
                    "generation is 7; expected 1"});
  };
  add(MessageType::fragment, "fragment header", 16);
  add(MessageType::metadata, "metadata header", 16);
  add(MessageType::grant, "grant message", 8);
  add(MessageType::poison, "poison message", 16);
  const std::vector<Row> types{
      {"of a type not known", MessageType::fragment, set_and_reseal(kTypeAt, 9),
       "fragment header: type is 9; expected 1"},
      {"of a type not known", MessageType::metadata, set_and_reseal(kTypeAt, 9),
       "metadata header: type is 9; expected 2"},
      {"of a type not known", MessageType::grant, set_and_reseal(kTypeAt, 9),
       "grant message: type is 9; expected 3"},
      {"of a type not known", MessageType::poison, set_and_reseal(kTypeAt, 9),
       "grant message: type is 9; expected 3"},
      {"where another type comes", MessageType::fragment, send_as(MessageKind::control),
       "grant message: type is 1; expected 3"},
      {"where another type comes", MessageType::metadata, send_as(MessageKind::control),
       "grant message: type is 2; expected 3"},
      {"where another type comes", MessageType::grant, send_as(MessageKind::metadata),
       "metadata header: type is 3; expected 2"},
      {"where another type comes", MessageType::poison, send_as(MessageKind::metadata),
       "metadata header: type is 4; expected 2"},
  };
  rows.insert(rows.end(), types.begin(), types.end());
  return rows;
}

/// The first message again when the second one has been sent.
Fault again_later() {
  return [kept = std::vector<Outgoing>()](Outgoing message) mutable {
    kept.push_back(std::move(message));
    if (kept.size() == 2) return std::vector{kept[1], kept[0]};
    return std::vector{kept.back()};
  };
}

/// The second message before the first one.
Fault overtake() {
  return [kept = std::vector<Outgoing>()](Outgoing message) mutable {
    kept.push_back(std::move(message));
    if (kept.size() == 1) return std::vector<Outgoing>();
    if (kept.size() == 2) return std::vector{kept[1], kept[0]};
    return std::vector{kept.back()};
  };
}

// Credit and refusals say the same when they say it twice, or late.
std::vector<Row> replayed() {
  return {
      {"twice", MessageType::fragment, twice, "fragment 0 of use 0 of plan 0 came out of turn"},
      {"again later", MessageType::fragment, again_later(),
       "fragment 0 of use 0 of plan 0 came out of turn"},
      {"twice", MessageType::metadata, twice, "metadata of"},
      {"twice", MessageType::grant, twice, ""},
      {"again later", MessageType::grant, again_later(), ""},
      {"after the next one", MessageType::fragment, overtake(),
       "fragment 1 of use 0 of plan 0 came out of turn"},
      {"after the next one", MessageType::grant, overtake(), ""},
  };
}

// What a faulty library would send: every checksum fits.
std::vector<Row> forged() {
  return {
      {"with more tokens than allowed", MessageType::metadata, set_and_reseal(43, 0xFF),
       "metadata of rank 2: num_tokens is 4278190104; allowed: 16777216"},
      {"with tokens that do not fit", MessageType::metadata, set_and_reseal(40, 1),
       "metadata of rank 2: membership: "},
      {"for a use that cannot come yet", MessageType::grant, set_and_reseal(20, 1),
       "a grant for use 1 of plan 0, which has sent"},
      {"for a use long after", MessageType::grant, set_and_reseal(23, 1),
       "a grant for use 16777216 of plan 0, which has sent"},
      {"of more than there is", MessageType::grant, set_and_reseal(27, 1), "a grant of 167772"},
      {"of another use", MessageType::fragment, set_and_reseal(28, 7),
       "dispatch (use 7 of plan 0) on rank 2"},
  };
}

class Hostile : public ::testing::Test {
 protected:
  static void check(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      SCOPED_TRACE(::testing::Message()
                   << "message of type " << static_cast<int>(row.type) << " " << row.fault);
      check(row);
    }
  }

 private:
  /// Changes what rank kSource sends to rank 0: whatever follows a fault that looks at one message
  /// stays as it is.
  static Tampering::Tamper tamper(const Row& row, int& changed) {
    return [&row, &changed, change = row.change](const Outgoing& message) {
      if (message.target != 0 || message.type() != row.type) return std::vector{message};
      const bool goes_on = row.fault == "again later" || row.fault == "after the next one";
      if (changed++ > 0 && !goes_on) return std::vector{message};
      return change(message);
    };
  }

  static void check(const Row& row) {
    SteppedRanks ranks(Topology::uniform(2, 2));
    for (const int rank : ranks.all()) {
      set_limits(ranks.transport(rank), {.metadata_limit_bytes = kMetadataLimit});
    }
    ranks.number_x();
    int changed = 0;
    ranks.network(kSource).set_tamper(tamper(row, changed));
    std::vector<RankCalls> calls = calls_of_all(ranks, kTwoUses);
    if (row.type == MessageType::poison) {
      for (RankCalls& one : calls) one.advance();
      calls[kSource].cancel("no more of it");
    }
    ASSERT_TRUE(run(ranks, calls)) << "no end";
    ASSERT_GT(changed, 0) << "no such message was sent";
    for (const int rank : ranks.all()) {
      const std::optional<Error>& error = calls[static_cast<std::size_t>(rank)].error();
      if (row.words.empty()) {
        EXPECT_FALSE(error) << "rank " << rank << ": " << error->what();
        EXPECT_EQ(ranks.find_out_error(rank), "") << "rank " << rank;
      } else if (row.type == MessageType::poison && rank != 0) {
        EXPECT_TRUE(error) << "rank " << rank;  // it may have read the refusal itself
      } else {
        expect_refusal(rank, error, row.words);
      }
    }
  }

 protected:
  static void expect_refusal(int rank, const std::optional<Error>& error,
                             const std::string& words) {
    ASSERT_TRUE(error) << "rank " << rank << " ended well";
    const std::string text = error->what();
    EXPECT_NE(text.find(words), std::string::npos) << "rank " << rank << ": " << text;
    EXPECT_NE(text.find("rank 2"), std::string::npos) << "rank " << rank << ": " << text;
  }
};

TEST_F(Hostile, TruncatedMessagesAreRefusedEverywhere) { check(truncated()); }
TEST_F(Hostile, OversizedMessagesAreRefusedEverywhere) { check(oversized()); }
TEST_F(Hostile, FlippedBitsAreRefusedEverywhere) { check(flipped()); }
TEST_F(Hostile, ForeignMessagesAreRefusedEverywhere) { check(foreign()); }
TEST_F(Hostile, ForgedMessagesAreRefusedEverywhere) { check(forged()); }
TEST_F(Hostile, ReplayedAndReorderedMessagesAreRefusedOrSayNothingNew) { check(replayed()); }

TEST_F(Hostile, MetadataOfAPlanThatIsMadeIsRefusedEverywhere) {
  SteppedRanks ranks(Topology::uniform(2, 2));
  std::vector<Outgoing> kept;
  ranks.network(kSource).set_tamper([&](const Outgoing& message) {
    std::vector<Outgoing> out{message};
    if (message.type() == MessageType::metadata) kept.push_back(message);
    if (message.type() == MessageType::fragment) out.insert(out.end(), kept.begin(), kept.end());
    return out;
  });
  std::vector<RankCalls> calls = calls_of_all(ranks, kTwoUses);
  ASSERT_TRUE(run(ranks, calls));
  for (const int rank : ranks.all()) {
    expect_refusal(rank, calls[static_cast<std::size_t>(rank)].error(),
                   "metadata of plan 0, which is made");
  }
}

}  // namespace
}  // namespace ferry::testing
