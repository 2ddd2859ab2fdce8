// Node memory, flags, refusals and abort, on every transport.

#include <algorithm>
#include <cstring>
#include <memory>

#include "transport/conformance.hpp"

namespace ferry::testing {
namespace {

using Flag = std::atomic<std::uint64_t>;

class NodeMemory : public Conformance {};

INSTANTIATE_TEST_SUITE_P(All, NodeMemory, ::testing::ValuesIn(all_settings()), name_of);

// Every rank writes a row into its neighbours' regions and raises a flag behind it.
TEST_P(NodeMemory, RowsAreVisibleBehindTheirFlag) {
  constexpr std::uint64_t kRowBytes = 4096;
  run_program(GetParam(), [](Transport& t, Script& script) {
    const std::vector<int>& local = t.topology().ranks_of(t.node());
    const std::uint64_t place_bytes = kRowBytes + 64;
    auto mine = std::make_shared<std::byte*>();
    script.once([=, &t, &local] {
      *mine = t.create_region(7, local.size() * place_bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(*mine) % 4096, 0U);
    });
    const std::uint64_t my_place = t.topology().local_index(t.rank()) * place_bytes;
    for (const int owner : local) {
      script.then([=, &t] {
        std::byte* const theirs = t.map_region(owner, 7);
        if (theirs == nullptr) return false;
        const auto row = pattern(t.rank() * 100 + owner, kRowBytes);
        std::memcpy(theirs + my_place + 64, row.data(), row.size());
        t.raise_flag(*reinterpret_cast<Flag*>(theirs + my_place), 5);
        return true;
      });
    }
    for (const int writer : local) {
      script.then([=, &t] {
        std::byte* const place = *mine + t.topology().local_index(writer) * place_bytes;
        const auto& flag = *reinterpret_cast<const Flag*>(place);
        if (!t.reached(flag, 4)) return false;
        EXPECT_FALSE(t.reached(flag, 6));
        EXPECT_TRUE(is_pattern({place + 64, kRowBytes}, writer * 100 + t.rank()));
        return true;
      });
    }
  });
}

TEST_P(NodeMemory, MapOfAnAbsentRegionIsNull) {
  run_program(GetParam(), [](Transport& t, Script& script) {
    script.once([&t] {
      EXPECT_EQ(t.map_region(t.rank(), 1), nullptr);
      std::byte* const memory = t.create_region(1, 100);
      EXPECT_EQ(t.map_region(t.rank(), 1), memory);
      t.retire_region(1);
      EXPECT_EQ(t.map_region(t.rank(), 1), nullptr);
    });
  });
}

TEST_P(NodeMemory, BigRegionsAreZeroToTheirEnd) {
  run_program({GetParam().kind, Topology::single_node(1)}, [](Transport& t, Script& script) {
    script.once([&t] {
      constexpr std::int64_t kBytes = (9LL << 20) + 100;
      std::byte* const memory = t.create_region(1, kBytes);
      EXPECT_EQ(std::count(memory, memory + kBytes, std::byte{0}), kBytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % (2U << 20), 0U) << "no huge pages";
      memory[kBytes - 1] = std::byte{1};
      EXPECT_NE(t.create_region(2, 0), nullptr);
    });
  });
}

TEST_P(NodeMemory, RegionsRefuseWhatCannotBe) {
  run_program(GetParam(), [](Transport& t, Script& script) {
    script.once([&t] {
      const int remote = remote_ranks(t).front();
      expect_refused(ErrorCode::invalid_argument, "shares no memory",
                     [&] { t.map_region(remote, 1); });
      expect_refused(ErrorCode::invalid_argument, "is no rank", [&] { t.map_region(-1, 1); });
      expect_refused(ErrorCode::resource_exhausted, "1125899906842624 bytes",
                     [&] { t.create_region(1, 1ULL << 50); });
      expect_refused(ErrorCode::resource_exhausted, "18446744073709551615 bytes",
                     [&] { t.create_region(1, ~0ULL); });
      t.create_region(1, 8);
      expect_refused(ErrorCode::invalid_argument, "already has a region of key 1",
                     [&] { t.create_region(1, 8); });
      expect_refused(ErrorCode::invalid_argument, "no region of key 2",
                     [&] { t.retire_region(2); });
    });
  });
}

TEST_P(NodeMemory, SendRefusesItsOwnNodeAndNoRank) {
  run_program(GetParam(), [](Transport& t, Script& script) {
    script.once([&t] {
      const std::byte byte{1};
      for (const int local : t.topology().ranks_of(t.node())) {
        expect_refused(ErrorCode::invalid_argument, "use node memory", [&] {
          t.send(local, MessageKind::payload, {&byte, 1});
        });
      }
      for (const int nobody : {-1, t.topology().num_ranks()}) {
        expect_refused(ErrorCode::invalid_argument, "is no rank", [&] {
          t.send(nobody, MessageKind::control, {&byte, 1});
        });
        expect_refused(ErrorCode::invalid_argument, "is no rank",
                       [&] { t.post_receive(nobody, {}); });
      }
      EXPECT_EQ(t.counters().messages, 0U);
      EXPECT_EQ(t.counters().payload_bytes, 0U);
      expect_refused(ErrorCode::invalid_argument, "no send with ticket", [&] { t.sent(999); });
      EXPECT_THROW(t.accept({.source = 0, .bytes = 0, .id = 5}, {}), Error);
    });
  });
}

TEST_P(NodeMemory, TheFirstAbortReachesEveryRank) {
  run_program(GetParam(), [](Transport& t, Script& script) {
    script.once([&t] {
      if (t.rank() != 1) return;
      EXPECT_FALSE(t.aborted());
      t.abort("rank 1 gave up");
      t.abort("a later text");
    });
    script.then([&t] { return t.aborted().has_value(); });
    script.once([&t] { EXPECT_EQ(*t.aborted(), "rank 1 gave up"); });
  });
}

}  // namespace
}  // namespace ferry::testing
