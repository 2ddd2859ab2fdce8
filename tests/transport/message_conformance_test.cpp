// Order, content, size and accounting of messages, on every transport.

#include <memory>

#include "base/hash.hpp"
#include "transport/conformance.hpp"

namespace ferry::testing {
namespace {

class Messages : public Conformance {};

INSTANTIATE_TEST_SUITE_P(All, Messages, ::testing::ValuesIn(all_settings()), name_of);

/// A message that both ends can make.
struct Expected {
  int source = 0;
  int target = 0;
  int number = 0;

  std::uint64_t seed() const { return base::mix64(source * 1000 + target) + number * 1'000'003ULL; }
  std::size_t bytes() const { return number % 5 == 0 ? 0 : base::mix64(seed()) % 3000; }
  MessageKind kind() const {
    return number % 3 == 0 ? MessageKind::metadata : MessageKind::control;
  }
};

/// Buffers and counts of one rank; shared by the steps of its script.
struct Traffic {
  std::vector<std::vector<std::byte>> out;
  std::vector<std::uint64_t> tickets;
  std::vector<std::vector<std::byte>> in;
  std::vector<int> num_from;
  std::uint64_t bytes_sent = 0;
  int num_received = 0;
};

void wait_for_sends(Transport& t, Script& script, const std::shared_ptr<Traffic>& traffic) {
  script.then([=, &t] {
    std::erase_if(traffic->tickets, [&](std::uint64_t ticket) { return t.sent(ticket); });
    return traffic->tickets.empty();
  });
}

void send_now(Transport& t, Traffic& traffic, const Expected& message, MessageKind kind) {
  traffic.out.push_back(pattern(message.seed(), message.bytes()));
  traffic.tickets.push_back(t.send(message.target, kind, traffic.out.back()));
  traffic.bytes_sent += message.bytes();
}

TEST_P(Messages, PayloadFillsPostedBuffersInOrder) {
  constexpr int kMessages = 40;
  run_program(GetParam(), [](Transport& t, Script& script) {
    auto traffic = std::make_shared<Traffic>();
    const std::vector<int> peers = remote_ranks(t);
    traffic->num_from.resize(t.topology().num_ranks());
    // Half of the buffers wait for messages, the other half lets messages wait.
    const auto post = [=, &t](int number) {
      for (const int source : peers) {
        traffic->in.emplace_back(3000 + number, std::byte{0xEE});
        t.post_receive(source, traffic->in.back());
      }
    };
    script.once([=] {
      for (int i = 0; i < kMessages / 2; ++i) post(i);
    });
    script.once([=, &t] {
      for (int i = 0; i < kMessages; ++i) {
        for (const int target : peers) {
          send_now(t, *traffic, {t.rank(), target, i}, MessageKind::payload);
        }
      }
    });
    script.then([=, &t] {
      while (const auto got = t.poll_received()) {
        const Expected expected{got->source, t.rank(), traffic->num_from[got->source]++};
        EXPECT_EQ(got->kind, MessageKind::payload);
        EXPECT_FALSE(got->truncated);
        EXPECT_EQ(got->bytes, expected.bytes());
        EXPECT_EQ(got->buffer.size(), 3000U + expected.number) << "not the buffers' own order";
        EXPECT_TRUE(is_pattern(got->buffer.first(got->bytes), expected.seed()));
        EXPECT_TRUE(got->bytes == got->buffer.size() || got->buffer[got->bytes] == std::byte{0xEE});
        if (expected.number < kMessages / 2 && got->source == peers.front()) {
          post(kMessages / 2 + expected.number);
        }
        ++traffic->num_received;
      }
      return traffic->num_received == kMessages * static_cast<int>(peers.size());
    });
    wait_for_sends(t, script, traffic);
    script.once([=, &t] {
      EXPECT_FALSE(t.poll_received());
      EXPECT_EQ(t.counters().payload_bytes, traffic->bytes_sent);
      EXPECT_EQ(t.counters().messages, kMessages * peers.size());
      EXPECT_EQ(t.counters().metadata_bytes + t.counters().control_bytes, 0U);
    });
  });
}

TEST_P(Messages, MetadataAndControlKeepOneOrder) {
  constexpr int kMessages = 30;
  run_program(GetParam(), [](Transport& t, Script& script) {
    auto traffic = std::make_shared<Traffic>();
    const std::vector<int> peers = remote_ranks(t);
    const int num_expected = kMessages * static_cast<int>(peers.size());
    traffic->num_from.resize(t.topology().num_ranks());
    traffic->in.reserve(num_expected);
    auto num_taken = std::make_shared<std::vector<int>>(t.topology().num_ranks());
    script.once([=, &t] {
      for (int i = 0; i < kMessages; ++i) {
        for (const int target : peers) {
          const Expected message{t.rank(), target, i};
          send_now(t, *traffic, message, message.kind());
        }
      }
    });
    script.then([=, &t] {
      while (const auto incoming = t.probe()) {
        const Expected expected{incoming->source, t.rank(), traffic->num_from[incoming->source]++};
        EXPECT_EQ(incoming->kind, expected.kind());
        EXPECT_EQ(incoming->bytes, expected.bytes());
        traffic->in.emplace_back(incoming->bytes + 1);
        t.accept(*incoming, traffic->in.back());
      }
      while (const auto got = t.poll_received()) {
        const Expected expected{got->source, t.rank(), (*num_taken)[got->source]++};
        EXPECT_EQ(got->kind, expected.kind());
        EXPECT_TRUE(is_pattern(got->buffer.first(got->bytes), expected.seed()));
        ++traffic->num_received;
      }
      return traffic->num_received == num_expected;
    });
    wait_for_sends(t, script, traffic);
    script.once([=, &t] {
      EXPECT_EQ(t.counters().metadata_bytes + t.counters().control_bytes, traffic->bytes_sent);
      EXPECT_GT(t.counters().metadata_bytes, 0U);
      EXPECT_GT(t.counters().control_bytes, 0U);
      EXPECT_EQ(t.counters().payload_bytes, 0U);
    });
  });
}

TEST_P(Messages, LargeMetadataArrivesWhole) {
  static constexpr std::size_t kBytes = (5U << 20) + 3;
  run_program(GetParam(), [](Transport& t, Script& script) {
    auto traffic = std::make_shared<Traffic>();
    const int target = t.topology().ranks_of(1).front();
    if (t.rank() == 0) {
      script.once([=, &t] {
        traffic->out.push_back(pattern(9, kBytes));
        traffic->tickets.push_back(t.send(target, MessageKind::metadata, traffic->out.back()));
      });
      wait_for_sends(t, script, traffic);
    } else if (t.rank() == target) {
      script.then([=, &t] {
        const auto incoming = t.probe();
        if (!incoming) return false;
        EXPECT_EQ(incoming->bytes, kBytes);
        traffic->in.emplace_back(kBytes);
        expect_refused(ErrorCode::invalid_argument, "buffer of 5 bytes",
                       [&] { t.accept(*incoming, std::span(traffic->in.back()).first(5)); });
        t.accept(*incoming, traffic->in.back());
        return true;
      });
      script.then([=, &t] {
        const auto got = t.poll_received();
        if (!got) return false;
        EXPECT_EQ(got->bytes, kBytes);
        EXPECT_TRUE(is_pattern(got->buffer, 9));
        return true;
      });
    }
  });
}

TEST_P(Messages, ALongMessageIsReportedAsTruncated) {
  run_program(GetParam(), [](Transport& t, Script& script) {
    auto traffic = std::make_shared<Traffic>();
    const std::vector<int> peers = remote_ranks(t);
    script.once([=, &t] {
      traffic->in.reserve(2 * peers.size());
      for (const int peer : peers) {
        for (const std::size_t size : {10U, 100U}) {
          traffic->in.emplace_back(size, std::byte{0xEE});
          t.post_receive(peer, traffic->in.back());
        }
        for (int i = 0; i < 2; ++i) {
          traffic->out.push_back(pattern(i, 100));
          traffic->tickets.push_back(t.send(peer, MessageKind::payload, traffic->out.back()));
        }
      }
    });
    script.then([=, &t] {
      while (const auto got = t.poll_received()) {
        EXPECT_EQ(got->truncated, got->buffer.size() == 10);
        EXPECT_TRUE(got->bytes == 100 || (got->truncated && got->bytes > got->buffer.size()));
        EXPECT_TRUE(got->truncated || is_pattern(got->buffer, 1));
        ++traffic->num_received;
      }
      return traffic->num_received == 2 * static_cast<int>(peers.size());
    });
    wait_for_sends(t, script, traffic);
  });
}

TEST_P(Messages, WithdrawnBuffersComeBackInOrder) {
  run_program(GetParam(), [](Transport& t, Script& script) {
    auto traffic = std::make_shared<Traffic>();
    script.once([=, &t] {
      const int peer = remote_ranks(t).front();
      for (const std::size_t size : {1U, 2U, 3U}) traffic->in.emplace_back(size);
      for (auto& buffer : traffic->in) t.post_receive(peer, buffer);
      const auto back = t.withdraw_receives(peer);
      ASSERT_EQ(back.size(), 3U);
      for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(back[i].data(), traffic->in[i].data());
      EXPECT_TRUE(t.withdraw_receives(peer).empty());
    });
  });
}

}  // namespace
}  // namespace ferry::testing
