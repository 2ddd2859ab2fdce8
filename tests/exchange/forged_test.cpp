// Messages with sound headers that no rank should have sent: each is refused with a text that names
// it, on every rank that it concerns, and nothing of it is used.

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/stepped_ranks.hpp"
#include "kernels/row_kernels.hpp"
#include "wire/headers.hpp"

namespace ferry::testing {
namespace {

/// The first dispatch of the first plan of the exchange.
wire::CallId first_dispatch() {
  wire::CallId call;
  call.generation = 1;
  call.exchange = 1;
  call.place = 1ULL << 32U;
  call.kind = wire::OpKind::dispatch;
  return call;
}

wire::CallId first_plan() {
  wire::CallId call = first_dispatch();
  call.place = 0;
  call.kind = wire::OpKind::plan;
  return call;
}

wire::FragmentHeader good_header() {
  return {.call = first_dispatch(),
          .num_rows = kRowsPerFragment,
          .payload_bytes = static_cast<std::uint32_t>(kPayloadBytes)};
}

std::vector<std::byte> fragment(const wire::FragmentHeader& header) {
  std::vector<std::byte> message(kFragmentBytes);
  wire::encode(header, std::span(message).first<wire::kFragmentHeaderBytes>());
  return message;
}

std::vector<std::byte> grant(const wire::Grant& grant) {
  std::vector<std::byte> message(wire::kGrantMessageBytes);
  wire::encode(wire::GrantMessage{.generation = 1, .grant = grant},
               std::span(message).first<wire::kGrantMessageBytes>());
  return message;
}

/// Metadata whose options differ from those of the exchange, so that its body is not read.
std::vector<std::byte> metadata(int source,
                                const std::function<void(wire::MetadataHeader&)>& spoil = {}) {
  std::vector<std::byte> message(wire::kMetadataHeaderBytes + 8);
  const auto body = std::span<const std::byte>(message).subspan(wire::kMetadataHeaderBytes);
  wire::MetadataHeader header;
  header.call = first_plan();
  header.source = static_cast<std::uint32_t>(source);
  header.body_bytes = body.size();
  header.body_crc = kernels::crc32c(body);
  if (spoil) spoil(header);
  wire::encode(header, std::span(message).first<wire::kMetadataHeaderBytes>());
  return message;
}

ExchangeOptions gathers() {
  ExchangeOptions options = small_ranges();
  options.strategy = Strategy::node_gather;
  return options;
}

struct BadFragment {
  std::string words;  ///< of the error
  std::function<void(wire::FragmentHeader&)> spoil;
};

std::vector<BadFragment> bad_fragments() {
  using Header = wire::FragmentHeader;
  // Marked as made after a failure where the order of calls would find them first.
  return {
      {"fragment 3 of use 0 of plan 0 came out of turn", [](Header& h) { h.index = 3; }},
      {"fragment 0 of use 1 of plan 0 came out of turn",
       [](Header& h) {
         h.call.ordinal = 1;
         h.call.after_failure = true;
       }},
      {"a fragment of plan",
       [](Header& h) {
         h.call.kind = wire::OpKind::plan;
         h.call.after_failure = true;
       }},
      {"fragment 0 of use 0 of plan 0 came out of turn",  // no numbers travel with it
       [](Header& h) {
         h.call.kind = wire::OpKind::dispatch_backward;
         h.stream = wire::Stream::values;
         h.call.after_failure = true;
       }},
      {"has 1 rows in 128 bytes; the plan says 2 rows in 128 bytes",
       [](Header& h) { h.num_rows = 1; }},
      {"128 bytes that are not 2 rows in packing 1",
       [](Header& h) { h.packing = wire::RowPacking::marked; }},
      {"128 bytes that are not 2 rows in packing 3",
       [](Header& h) { h.packing = wire::RowPacking::bitmask; }},
      {"payload_bytes is 192, but 128 bytes came", [](Header& h) { h.payload_bytes = 192; }},
      {"payload_bytes is 64, but 128 bytes came", [](Header& h) { h.payload_bytes = 64; }},
      {"payload_crc of fragment 0 of dispatch",
       [](Header& h) {
         h.has_crc = true;
         h.payload_crc = 1;
       }},
  };
}

TEST(Forged, FragmentThatDoesNotFitEndsItsCallOnEveryRank) {
  for (const BadFragment& bad : bad_fragments()) {
    SCOPED_TRACE(bad.words);
    SteppedRanks ranks(nodes(2));
    const std::vector<Plan> plans = ranks.plan_all();
    auto first = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
    wire::FragmentHeader header = good_header();
    bad.spoil(header);
    ranks.forge(1, 0, MessageKind::payload, fragment(header));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return first.done(); }));
    const auto error = error_of(first);
    expect_error(error, ErrorCode::corrupt_message, bad.words);
    auto second = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return second.done(); }));
    expect_error(error_of(second), ErrorCode::corrupt_message, error->what());
    ranks.use(ranks.plan_all());  // the exchange goes on
  }
}

// 16 columns of int8 are a scale of 4 bytes and 16 codes.
TEST(Forged, QuantisedRowsOfAnotherSizeAreRefused) {
  ExchangeOptions options = small_ranges();
  options.wire_dispatch = WireFormat::int8;
  options.fragment_bytes = wire::kFragmentHeaderBytes + 40;
  const std::vector<std::uint32_t> sizes{
      32,   // codes without scales
      36,   // one scale for both rows
      64};  // as rows of bf16
  for (const std::uint32_t size : sizes) {
    SCOPED_TRACE(size);
    SteppedRanks ranks(nodes(2), options);
    const std::vector<Plan> plans = ranks.plan_all();
    auto call = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
    wire::FragmentHeader header = good_header();
    header.payload_bytes = size;
    std::vector<std::byte> message = fragment(header);
    message.resize(wire::kFragmentHeaderBytes + size);
    ranks.forge(1, 0, MessageKind::payload, message);
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return call.done(); }));
    const auto error = error_of(call);
    expect_error(error, ErrorCode::corrupt_message,
                 "has 2 rows in " + std::to_string(size) +
                     " bytes; the plan says 2 rows in 40 bytes");
    auto other = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return other.done(); }));
    expect_error(error_of(other), ErrorCode::corrupt_message, error->what());
    ranks.use(ranks.plan_all());
  }
}

TEST(Forged, FragmentWithoutCreditIsRefused) {
  // What a plan grants is one fragment; the rest waits until the receiver starts its dispatch.
  SteppedRanks ranks(nodes(2));
  const std::vector<Plan> plans = ranks.plan_all();
  wire::FragmentHeader header = good_header();
  ranks.forge(1, 0, MessageKind::payload, fragment(header));
  ++header.index;
  ranks.forge(1, 0, MessageKind::payload, fragment(header));
  ranks.work(ranks.all(), 50);
  auto call = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return call.done(); }));
  expect_error(error_of(call), ErrorCode::corrupt_message,
               "fragment 1 of use 0 of plan 0 came out of turn or without credit");
}

TEST(Forged, FragmentsBeyondAStagingBudgetAreRefused) {
  SteppedRanks ranks(nodes(2), gathers());
  const std::vector<Plan> plans = ranks.plan_all();  // its credit leaves receives to abuse
  set_limits(ranks.transport(0), {.gather_staging_bytes = 1});
  auto gathering = ranks.exchange(0).start_gather(ranks.x(0));
  wire::FragmentHeader header = good_header();
  header.call.plan = 1;
  for (header.index = 0; header.index < 2; ++header.index) {
    ranks.forge(1, 0, MessageKind::payload, fragment(header));
  }
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return gathering.done(); }));
  expect_error(error_of(gathering), ErrorCode::corrupt_message,
               "fragment 1 before plan 1 came out of turn or without credit");
}

TEST(Forged, MoreRowsThanThePlanHasAreRefused) {
  SteppedRanks ranks(nodes(2), gathers());
  std::vector<Pending<ExpertRows>> gathering;
  for (const int rank : ranks.all()) {
    gathering.push_back(ranks.exchange(rank).start_gather(ranks.x(rank)));
  }
  ranks.work(ranks.all(), 200);  // every row is staged
  wire::FragmentHeader header = good_header();
  header.call.place = 0;
  header.index = kFragments;
  ranks.forge(1, 0, MessageKind::payload, fragment(header));
  ranks.work(ranks.all(), 50);
  std::vector<Pending<Plan>> planning;
  for (const int rank : ranks.all()) {
    planning.push_back(ranks.exchange(rank).start_plan(ranks.routing(rank),
                                                       gathering[static_cast<std::size_t>(rank)]));
  }
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return gathering[0].done(); }));
  expect_error(error_of(gathering[0]), ErrorCode::corrupt_message,
               "more fragments came than the plan has");
}

struct BadMessage {
  std::string words;
  MessageKind kind;
  std::vector<std::byte> bytes;
};

TEST(Forged, MessageWithoutAUsableHeaderEndsTheJob) {
  const std::vector<BadMessage> messages{
      {"fragment header: size is 7 bytes", MessageKind::payload, std::vector<std::byte>(7)},
      {"its size is more than the", MessageKind::payload, std::vector<std::byte>(100'000)},
      {"magic is", MessageKind::payload, std::vector<std::byte>(kFragmentBytes)},
      {"magic is", MessageKind::metadata, std::vector<std::byte>(200)},
      {"magic is", MessageKind::control, std::vector<std::byte>(40)},
      {"sent a control message of 1089 bytes", MessageKind::control, std::vector<std::byte>(1089)},
      {"sent a metadata message of 4097 bytes", MessageKind::metadata,
       std::vector<std::byte>(4097)},
      {"a grant of 99 fragments", MessageKind::control,
       grant({.exchange = 1, .ordinal = 0, .fragments = 99, .kind = wire::OpKind::dispatch})},
  };
  for (const BadMessage& bad : messages) {
    SCOPED_TRACE(bad.words);
    SteppedRanks ranks(nodes(2));
    for (const int rank : ranks.all()) {
      set_limits(ranks.transport(rank), {.metadata_limit_bytes = 4096});
    }
    const std::vector<Plan> plans = ranks.plan_all();
    auto first = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
    ranks.forge(1, 0, bad.kind, bad.bytes);
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return first.done(); }));
    expect_error(error_of(first), ErrorCode::peer_failed, bad.words);
    auto second = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return second.done(); }));
    expect_error(error_of(second), ErrorCode::peer_failed, bad.words);
  }
}

TEST(Forged, GrantOfALaneThatIsNotThereEndsTheJob) {
  SteppedRanks ranks(Topology::uniform(2, 2));
  const std::vector<Plan> plans = ranks.plan_all();
  auto call = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  // Rank 0 sends to rank 2, its rail on the other node, and never to rank 3.
  ranks.forge(3, 0, MessageKind::control,
              grant({.exchange = 1, .fragments = 1, .kind = wire::OpKind::dispatch}));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return call.done(); }));
  expect_error(error_of(call), ErrorCode::peer_failed, "which has no such lane");
}

TEST(Forged, MetadataThatDoesNotFitEndsItsPlan) {
  const std::vector<std::pair<std::string, std::function<void(wire::MetadataHeader&)>>> bad{
      {"metadata of rank 1: body_crc does not fit", [](auto& header) { ++header.body_crc; }},
      {"metadata of rank 1: body_bytes is 9, but 8", [](auto& header) { ++header.body_bytes; }},
      {"metadata of rank 1: source is 0", [](auto& header) { header.source = 0; }},
  };
  for (const auto& [words, spoil] : bad) {
    SCOPED_TRACE(words);
    SteppedRanks ranks(nodes(2));
    ranks.forge(1, 0, MessageKind::metadata, metadata(1, spoil));
    ranks.work(ranks.all(), 20);
    auto call = ranks.exchange(0).start_plan(ranks.routing(0));
    auto other = ranks.exchange(1).start_plan(ranks.routing(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return call.done() && other.done(); }));
    const auto error = error_of(call);
    expect_error(error, ErrorCode::corrupt_message, words);
    // The other rank may have its plan by then: the plan's first call ends the same way.
    std::optional<Error> theirs;
    try {
      auto later = ranks.exchange(1).start_dispatch(other.wait(), ranks.x(1));
      ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return later.done(); }));
      theirs = error_of(later);
    } catch (const Error& failed) {
      theirs = failed;
    }
    expect_error(theirs, ErrorCode::corrupt_message, error->what());
  }
}

TEST(Forged, MetadataThatComesTwiceIsRefused) {
  SteppedRanks ranks(nodes(2));
  for (int time = 0; time < 2; ++time) ranks.forge(1, 0, MessageKind::metadata, metadata(1));
  ranks.work(ranks.all(), 20);
  auto call = ranks.exchange(0).start_plan(ranks.routing(0));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return call.done(); }));
  expect_error(error_of(call), ErrorCode::corrupt_message, "metadata of rank 1: it came twice");
}

TEST(Forged, MetadataThatLandsOnAnotherRankIsRefused) {
  SteppedRanks ranks(Topology::uniform(2, 2));
  ranks.forge(3, 0, MessageKind::metadata, metadata(3));
  ranks.work(ranks.all(), 20);
  auto call = ranks.exchange(0).start_plan(ranks.routing(0));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return call.done(); }));
  expect_error(error_of(call), ErrorCode::corrupt_message,
               "metadata of rank 3: it lands on another rank");
}

// Control messages overtake payload, and grants ride on both: one may come after a later one.
TEST(Forged, LateGrantTakesNothingBack) {
  for (const int earlier_uses : {0, 1}) {
    SCOPED_TRACE(earlier_uses);
    ExchangeOptions options = small_ranges();
    options.ranges_in_flight = kFragments;
    SteppedRanks ranks(nodes(2), options);
    const std::vector<Plan> plans = ranks.plan_all();
    for (int use = 0; use < earlier_uses; ++use) ranks.use(plans);
    auto receiving = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
    ranks.work(ranks.all(), 50);  // rank 0 may send all fragments now
    ranks.forge(1, 0, MessageKind::control,
                grant({.exchange = 1, .fragments = 2, .kind = wire::OpKind::dispatch}));
    ranks.work(ranks.all(), 50);
    auto sending = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
    EXPECT_TRUE(ranks.work_until(ranks.all(), [&] { return receiving.done() && sending.done(); }));
  }
}

}  // namespace
}  // namespace ferry::testing
