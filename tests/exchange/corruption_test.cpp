// Damage between the checksum of the sender and the check of the receiver, in as many messages as
// it takes to trust the answer: each damaged message is found, and every rank learns of it.

#include <array>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "exchange/messages.hpp"
#include "exchange/rank_calls.hpp"
#include "support/damage.hpp"

namespace ferry::testing {
namespace {

using support::Damage;
using wire::MessageType;

#ifdef __SANITIZE_ADDRESS__
constexpr int kMessages = 1'000;  // it takes ten times as long, and the answer is the same
#else
constexpr int kMessages = 10'000;
#endif
constexpr std::uint64_t kSeed = 20'251;
constexpr std::array kLayer{Call::plan, Call::dispatch, Call::combine};

/// What is to be damaged: the next message of a type from one rank to another.
struct Aim {
  int source = 0;
  int target = 0;
  MessageType type = MessageType::fragment;
  Damage damage = Damage::bit;
  bool in_header = false;
};

Aim draw_aim(std::mt19937_64& random) {
  constexpr std::array kTypes{MessageType::fragment, MessageType::fragment, MessageType::metadata,
                              MessageType::metadata, MessageType::grant,    MessageType::poison};
  Aim aim;
  // With two ranks on each of two nodes, the rail of a rank stands across from it.
  aim.source = static_cast<int>(random() % 4);
  aim.target = (aim.source + 2) % 4;
  aim.type = kTypes[random() % kTypes.size()];
  aim.damage = support::kDamages[random() % std::size(support::kDamages)];
  aim.in_header = random() % 2 == 0;
  return aim;
}

class Corruption {
 public:
  /// Damages one message and lets all ranks make their calls to the end. Empty where it was found.
  std::string run_one(const Aim& aim) {
    // Where no header could be trusted the job is over, and a new one begins.
    if (!ranks_ || ranks_->transport(0).aborted()) {
      calls_.clear();
      ranks_ = std::make_unique<SteppedRanks>(Topology::uniform(2, 2));
    }
    bool hit = false;
    ranks_->network(aim.source).set_tamper([&](const Outgoing& message) {
      if (hit || message.target != aim.target || message.type() != aim.type) {
        return std::vector{message};
      }
      hit = true;
      Outgoing damaged = message;
      const std::span bytes(damaged.bytes);
      const std::size_t header = header_bytes(message);
      const bool in_header = aim.in_header || header == bytes.size();
      support::damage(in_header ? bytes.first(header) : bytes.subspan(header), aim.damage, random_);
      return std::vector{damaged};
    });
    calls_ = calls_of_all(*ranks_, kLayer);
    if (aim.type == MessageType::poison) {
      for (RankCalls& one : calls_) one.advance();  // nothing has arrived yet
      calls_[static_cast<std::size_t>(aim.source)].cancel("no more of it");
    }
    const bool ended = run(*ranks_, calls_);
    ranks_->network(aim.source).set_tamper({});
    if (!ended) return "some rank did not end";
    return hit ? find_fault(aim) : "no such message was sent";
  }

  std::mt19937_64& random() { return random_; }

 private:
  std::string find_fault(const Aim& aim) const {
    for (const int rank : ranks_->all()) {
      const std::optional<Error>& error = calls_[static_cast<std::size_t>(rank)].error();
      if (!error) return fmt::format("rank {} ended well", rank);
      // The refusal that was damaged may have reached the others.
      if (aim.type == MessageType::poison && rank != aim.target) continue;
      const std::string text = error->what();
      const bool named = text.find(fmt::format("rank {}", aim.source)) != std::string::npos;
      if (!named) return fmt::format("rank {} says: {}", rank, text);
    }
    return {};
  }

  std::mt19937_64 random_{kSeed};
  std::unique_ptr<SteppedRanks> ranks_;
  std::vector<RankCalls> calls_;
};

TEST(Corruption, EveryDamagedMessageIsFoundAndEveryRankIsTold) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  Corruption corruption;
  int found = 0;
  for (int message = 0; message < kMessages; ++message) {
    const Aim aim = draw_aim(corruption.random());
    const std::string fault = corruption.run_one(aim);
    found += fault.empty() ? 1 : 0;
    ASSERT_EQ(fault, "") << "message " << message << " of type " << static_cast<int>(aim.type)
                         << " from rank " << aim.source << " to rank " << aim.target << ": "
                         << support::to_string(aim.damage);
  }
  EXPECT_EQ(found, kMessages);
}

}  // namespace
}  // namespace ferry::testing
