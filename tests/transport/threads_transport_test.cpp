// What only ranks on threads do: blocking, waking, failing together, links with a rate.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>

#include "base/clock.hpp"
#include "ferry/error.hpp"
#include "ferry/threads.hpp"
#include "transport/harness.hpp"

namespace ferry::testing {
namespace {

using Flag = std::atomic<std::uint64_t>;

void wait_for_step(Transport& transport, Script::Step step) {
  Script script;
  script.then(std::move(step));
  wait_for(transport, script);
}

// Every rank passes a counter through flags in a ring, and messages to its peer on the other node.
// Unsynchronised memory travels with both, so that a race detector sees a missing order.
TEST(Threads, EightRanksHammerFlagsAndMessages) {
  constexpr int kRounds = 400;
  threads::run({.nodes = 2, .ranks_per_node = 4}, [](Transport& t) {
    const Topology& shape = t.topology();
    const std::vector<int>& local = shape.ranks_of(t.node());
    const int place = shape.local_index(t.rank());
    const int next = local[(place + 1) % local.size()];
    const int peer = shape.rail_rank(t.rank(), 1 - t.node());
    auto* const mine = t.create_region(1, 128);
    std::byte* theirs = nullptr;
    wait_for_step(t, [&] { return (theirs = t.map_region(next, 1)) != nullptr; });
    auto& my_flag = *reinterpret_cast<Flag*>(mine);
    auto& next_flag = *reinterpret_cast<Flag*>(theirs);
    std::vector<std::byte> out(2000), in(2000);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      theirs[64] = static_cast<std::byte>(round);
      t.raise_flag(next_flag, round);
      t.post_receive(peer, in);
      std::fill(out.begin(), out.end(), static_cast<std::byte>(round + t.rank()));
      const std::uint64_t ticket = t.send(peer, MessageKind::payload, out);
      std::optional<Received> got;
      bool sent = false;
      wait_for_step(t, [&] {
        if (!got) got = t.poll_received();
        sent = sent || t.sent(ticket);
        return got && sent && t.reached(my_flag, round);
      });
      ASSERT_EQ(mine[64], static_cast<std::byte>(round));
      ASSERT_EQ(in.back(), static_cast<std::byte>(round + peer));
      // The writer may go on only when its row was read.
      t.raise_flag(reinterpret_cast<Flag*>(mine)[1], round);
      wait_for_step(t, [&] { return t.reached(reinterpret_cast<Flag*>(theirs)[1], round); });
    }
    t.raise_flag(my_flag, kRounds + 1);
  });
}

TEST(Threads, PayloadIsTheSendersMemoryUntilItIsTaken) {
  threads::run({.nodes = 2, .ranks_per_node = 1}, [](Transport& t) {
    std::vector<std::byte> bytes(100, std::byte{1});
    if (t.rank() == 0) {
      const std::uint64_t payload = t.send(1, MessageKind::payload, bytes);
      EXPECT_FALSE(t.sent(payload)) << "nobody gave memory for it yet";
      const std::uint64_t go = t.send(1, MessageKind::control, {bytes.data(), 1});
      EXPECT_TRUE(t.sent(go)) << "small control messages are copied";
      wait_for_step(t, [&] { return t.sent(payload); });
    } else {
      std::optional<Incoming> go;
      wait_for_step(t, [&] { return (go = t.probe()).has_value(); });
      EXPECT_FALSE(t.poll_received());
      t.post_receive(0, bytes);
      wait_for_step(t, [&] { return t.poll_received().has_value(); });
    }
  });
}

TEST(Threads, TheFirstFailureFreesTheOthersAndIsThrownAgain) {
  std::atomic<int> num_freed{0};
  try {
    threads::run({.nodes = 2, .ranks_per_node = 2}, [&](Transport& t) {
      if (t.rank() == 2) throw std::out_of_range("no such expert");
      try {
        wait_for_step(t, [] { return false; });
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::peer_failed);
        EXPECT_STREQ(error.what(), "rank 2 failed: no such expert");
        ++num_freed;
        throw;
      }
    });
    ADD_FAILURE() << "run() ended well";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "no such expert");
  }
  EXPECT_EQ(num_freed, 3);
  EXPECT_THROW(threads::run({.nodes = 1, .ranks_per_node = 2},
                            [](Transport& t) {
                              if (t.rank() == 0) throw 5;
                              wait_for_step(t, [] { return false; });
                            }),
               int);
}

// A rank leaves while its neighbour still reads its memory.
TEST(Threads, RegionsOutliveTheirRank) {
  std::atomic<bool> left{false};
  threads::run({.nodes = 1, .ranks_per_node = 2}, [&](Transport& t) {
    if (t.rank() == 0) {
      t.create_region(1, 8)[0] = std::byte{9};
      t.attachment = std::make_unique<TransportAttachment>();
      left = true;
      return;
    }
    wait_for_step(t, [&] { return left.load(); });
    EXPECT_EQ(t.map_region(0, 1)[0], std::byte{9});
  });
}

struct Goodbye : TransportAttachment {
  Goodbye(Transport& t, std::byte* own) : transport(t), memory(own) {}
  ~Goodbye() override {
    memory[0] = std::byte{1};
    transport.retire_region(1);
  }
  Transport& transport;
  std::byte* memory;
};

TEST(Threads, AttachmentsGoWhileTheirTransportWorks) {
  const auto attach = [](Transport& t) {
    t.attachment = std::make_unique<Goodbye>(t, t.create_region(1, 8));
  };
  threads::run({.nodes = 1, .ranks_per_node = 2}, attach);
  EXPECT_THROW(threads::run({.nodes = 1, .ranks_per_node = 2},
                            [&](Transport& t) {
                              attach(t);
                              throw std::runtime_error("after it attached");
                            }),
               std::runtime_error);
}

struct Buffer : TransportAttachment {
  std::vector<std::byte> bytes = std::vector<std::byte>(1 << 20);
};

// A failed rank takes its memory with it; what it had sent must not be read any more.
TEST(Threads, SendsOfAFailedRankAreWithdrawn) {
  std::atomic<bool> looked{false};
  const auto fail_with_a_send_under_way = [&](Transport& t) {
    std::vector<std::byte> in(1 << 20);
    if (t.rank() == 0) {
      auto owner = std::make_unique<Buffer>();
      const auto ticket = t.send(1, MessageKind::payload, owner->bytes);
      t.attachment = std::move(owner);
      EXPECT_FALSE(t.sent(ticket));
      throw std::runtime_error("rank 0 is gone");
    }
    // No wait of the transport: those end with the abort. Then rank 0 gets time to go.
    while (!t.aborted()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    t.post_receive(0, in);
    EXPECT_FALSE(t.poll_received());
    looked = true;
  };
  EXPECT_THROW(threads::run({.nodes = 2, .ranks_per_node = 1}, fail_with_a_send_under_way),
               std::runtime_error);
  EXPECT_TRUE(looked);
}

// Nothing arrives before a link of that rate could have brought it, whoever sends.
TEST(Threads, ALinkIsNeverFasterThanItsRate) {
  constexpr double kBits_per_s = 1e9;
  constexpr std::size_t kBytes = 60 * 1024;
  constexpr int kMessages = 20;
  std::atomic<double> start{0};
  threads::Options options{.nodes = 2, .ranks_per_node = 4};
  options.link_bits_per_s = kBits_per_s;
  std::vector<double> ends(4);
  threads::run(options, [&](Transport& t) {
    EXPECT_TRUE(t.paced());
    std::vector<std::byte> memory(kBytes);
    const int peer = t.topology().rail_rank(t.rank(), 1 - t.node());
    if (t.node() == 0) {
      double none = 0;
      start.compare_exchange_strong(none, base::now_s());
      std::vector<std::uint64_t> tickets;
      for (int i = 0; i < kMessages; ++i) {
        tickets.push_back(t.send(peer, MessageKind::payload, memory));
      }
      wait_for_step(t, [&] {
        std::erase_if(tickets, [&](std::uint64_t ticket) { return t.sent(ticket); });
        return tickets.empty();
      });
      return;
    }
    for (int i = 0; i < kMessages; ++i) {
      t.post_receive(peer, memory);
      wait_for_step(t, [&] { return t.poll_received().has_value(); });
    }
    ends[t.topology().local_index(t.rank())] = base::now_s();
  });
  const double elapsed_s = *std::max_element(ends.begin(), ends.end()) - start;
  EXPECT_GE(elapsed_s, 4 * kMessages * kBytes * 8 / kBits_per_s * 0.99);
}

TEST(Threads, RefusesOptionsThatMakeNoSense) {
  const auto nothing = [](Transport&) {};
  EXPECT_THROW(threads::run({.nodes = 0}, nothing), Error);
  EXPECT_THROW(threads::run({.ranks_per_node = -1}, nothing), Error);
  for (const double rate : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    threads::Options options;
    options.link_bits_per_s = rate;
    EXPECT_THROW(threads::run(options, nothing), Error);
  }
}

}  // namespace
}  // namespace ferry::testing
