// All ranks of an exchange in one thread, and a network that does what the input says to the
// messages between them. Whatever it does, the calls of every rank end, done or failed, with no
// more memory than the limits allow; where it only damaged, repeated or delayed what was sent, they
// end by themselves, and what ended well has the right rows.
//
// The input: 2 bytes that choose the exchange and its calls, then events of 8 bytes: the message
// (type and place), what happens to it, where, and 4 bytes for that.

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "exchange/messages.hpp"
#include "exchange/rank_calls.hpp"
#include "fuzz/fuzz.hpp"

namespace ferry::fuzz {
namespace {

using testing::Call;
using testing::Outgoing;
using testing::RankCalls;
using testing::SteppedRanks;

constexpr std::size_t kHeadBytes = 2;
constexpr std::size_t kEventBytes = 8;
constexpr std::size_t kMostEvents = 16;
constexpr int kSteps = 1500;
constexpr int kStepsOfFlush = 50;
constexpr TransportLimits kLimits{.pool_limit_bytes = 8 << 20,
                                  .metadata_limit_bytes = 64 << 10,
                                  .num_tokens_limit = 4096,
                                  .gather_staging_bytes = 64 << 10};
constexpr std::uint64_t kStagingLimit = 4 << 20;

enum class Action : std::uint8_t {
  flip,  ///< damage of up to 4 bytes
  resize,
  repeat,      ///< sent twice
  hold,        ///< sent after the next one, or when nothing else moves
  replay,      ///< an earlier message is sent besides
  other_kind,  ///< sent as another kind of message
  // With checksums that fit: what a faulty or hostile library would send.
  forge,  ///< 4 bytes of it are others
  forge_resized,
  make_up,  ///< 4 bytes and zeros, besides
};
constexpr int kActions = static_cast<int>(Action::make_up) + 1;

constexpr bool is_lie(Action action) { return action >= Action::forge; }

struct Event {
  wire::MessageType type = wire::MessageType::fragment;
  int place = 0;  ///< among the messages of its type, of all ranks
  Action action = Action::flip;
  std::uint16_t at = 0;
  std::array<std::byte, 4> value{};
};

struct Script {
  std::array<unsigned, kHeadBytes> head{};
  std::vector<Event> events;

  bool lies() const {
    return std::ranges::any_of(events, [](const Event& event) { return is_lie(event.action); });
  }
};

Script read_script(Input input) {
  Script script;
  for (std::size_t i = 0; i < std::min(kHeadBytes, input.size()); ++i) {
    script.head[i] = std::to_integer<unsigned>(input[i]);
  }
  input = input.subspan(std::min(kHeadBytes, input.size()));
  for (; input.size() >= kEventBytes && script.events.size() < kMostEvents;
       input = input.subspan(kEventBytes)) {
    const auto choice = std::to_integer<unsigned>(input[0]);
    Event event;
    event.type = static_cast<wire::MessageType>(1 + choice % 4);
    event.place = static_cast<int>(choice / 4);
    event.action = static_cast<Action>(std::to_integer<int>(input[1]) % kActions);
    std::memcpy(&event.at, &input[2], sizeof event.at);
    std::ranges::copy(input.subspan(4, 4), event.value.begin());
    script.events.push_back(event);
  }
  return script;
}

std::vector<std::byte> write_script(const Script& script) {
  std::vector<std::byte> bytes;
  for (const unsigned byte : script.head) bytes.push_back(static_cast<std::byte>(byte));
  for (const Event& event : script.events) {
    const auto type = static_cast<int>(event.type) - 1;
    bytes.push_back(static_cast<std::byte>(event.place * 4 + type));
    bytes.push_back(static_cast<std::byte>(event.action));
    bytes.push_back(static_cast<std::byte>(event.at & 0xFF));
    bytes.push_back(static_cast<std::byte>(event.at >> 8));
    bytes.insert(bytes.end(), event.value.begin(), event.value.end());
  }
  return bytes;
}

Topology choose_topology(unsigned choice) {
  switch (choice % 4) {
    case 0: return Topology::uniform(2, 1);
    case 1: return Topology::uniform(2, 2);
    case 2: return Topology::uniform(3, 1);
    default: return Topology::from_map({0, 1, 1});
  }
}

ExchangeOptions choose_options(const Script& script) {
  ExchangeOptions options = testing::small_ranges();
  options.strategy = static_cast<Strategy>(script.head[0] / 4 % 4);
  options.checksum_payload = script.head[0] / 16 % 2 == 0;
  const unsigned form = script.head[1];
  if (form % 8 != 0) options.wire_dispatch = static_cast<WireFormat>(form % 8);
  if (form / 8 % 8 != 0) options.wire_combine = static_cast<WireFormat>(form / 8 % 8);
  const auto quantised = [](const std::optional<WireFormat>& format) {
    return format && is_quantised(*format);
  };
  const bool bounded = form / 64 % 2 != 0;
  if (bounded && (quantised(options.wire_dispatch) || quantised(options.wire_combine))) {
    options.max_relative_error = 0.01F;
  }
  if (form / 128 % 2 != 0) options.weights = WeightMode::none;
  options.row_sources = script.head[0] / 128 % 2 != 0;
  return options;
}

std::span<const Call> choose_calls(const Script& script) {
  static constexpr std::array kForward{Call::all_gather, Call::plan, Call::dispatch, Call::combine,
                                       Call::all_gather};
  static constexpr std::array kReplay{Call::plan, Call::dispatch, Call::combine, Call::dispatch,
                                      Call::combine};
  static constexpr std::array kEarly{Call::plan_and_dispatch, Call::combine,
                                     Call::plan_and_dispatch, Call::combine};
  static constexpr std::array kGather{Call::gather_and_plan, Call::end_gather, Call::combine,
                                      Call::gather_and_plan, Call::end_gather, Call::combine};
  static constexpr std::array kBackward{Call::plan, Call::combine_backward,
                                        Call::dispatch_backward};
  switch (script.head[0] / 32 % 4) {
    case 0: return kForward;
    case 1: return kReplay;
    case 2:
      if (choose_options(script).strategy == Strategy::node_gather) return kGather;
      return kEarly;
    default: return kBackward;
  }
}

/// Carries out the events.
class Enemy {
 public:
  Enemy(SteppedRanks& ranks, const Script& script)
      : ranks_(ranks), script_(script), sent_(ranks.all().size()), held_(ranks.all().size()) {
    for (const int rank : ranks.all()) {
      ranks.network(rank).set_tamper([this, rank](const Outgoing& message) {
        return change(static_cast<std::size_t>(rank), message);
      });
    }
  }

  /// What was held back goes on its way.
  void flush() {
    for (const int rank : ranks_.all()) {
      for (Outgoing& message : std::exchange(held_[static_cast<std::size_t>(rank)], {})) {
        ranks_.network(rank).inject(std::move(message));
      }
    }
  }
  /// Bytes of payload were changed.
  bool spoiled() const { return spoiled_; }

 private:
  std::vector<Outgoing> change(std::size_t rank, const Outgoing& message) {
    const wire::MessageType type = message.type();
    const int place = places_[type]++;
    sent_[rank].push_back(message);
    std::vector<Outgoing> out{message};
    bool hold = false;
    for (const Event& event : script_.events) {
      if (event.type != type || event.place != place) continue;
      hold |= event.action == Action::hold;
      if (event.action == Action::replay) out.push_back(sent_[rank][event.at % sent_[rank].size()]);
      act(event, out);
    }
    std::vector<Outgoing>& held = held_[rank];
    if (hold) {
      held.insert(held.end(), out.begin(), out.end());
      return {};
    }
    out.insert(out.end(), held.begin(), held.end());
    held.clear();
    return out;
  }

  void act(const Event& event, std::vector<Outgoing>& out) {
    Outgoing& message = out.front();
    switch (event.action) {
      case Action::flip: flip(event, message); break;
      case Action::resize: resize(event, message); break;
      case Action::repeat: out.push_back(Outgoing(message)); break;
      case Action::hold:
      case Action::replay: break;  // where the other messages are known
      case Action::other_kind:
        message.kind = event.at % 2 == 0 ? MessageKind::metadata : MessageKind::control;
        break;
      case Action::forge_resized: resize(event, message); [[fallthrough]];
      case Action::forge:
        put(event, message.bytes);
        testing::reseal(message);
        break;
      case Action::make_up: {
        Outgoing made{message.target, message.kind, std::vector<std::byte>(event.at % 2048)};
        put(event, made.bytes);
        out.push_back(std::move(made));
        break;
      }
    }
  }

  void flip(const Event& event, Outgoing& message) {
    for (std::size_t i = 0; i < event.value.size() && !message.bytes.empty(); ++i) {
      const std::size_t at = (event.at + i) % message.bytes.size();
      message.bytes[at] ^= event.value[i];
      spoiled_ |= at >= testing::header_bytes(message);
    }
  }

  static void put(const Event& event, std::vector<std::byte>& bytes) {
    for (std::size_t i = 0; i < event.value.size() && !bytes.empty(); ++i) {
      bytes[(event.at + i) % bytes.size()] = event.value[i];
    }
  }

  static void resize(const Event& event, Outgoing& message) {
    message.bytes.resize(event.at % (2 * message.bytes.size() + 1));
  }

  SteppedRanks& ranks_;
  const Script& script_;
  std::map<wire::MessageType, int> places_;
  std::vector<std::vector<Outgoing>> sent_;  ///< by rank
  std::vector<std::vector<Outgoing>> held_;
  bool spoiled_ = false;
};

bool run_on(SteppedRanks& ranks, std::vector<RankCalls>& calls, Enemy& enemy) {
  for (int steps = 0; steps < kSteps; steps += kStepsOfFlush) {
    if (testing::run(ranks, calls, kStepsOfFlush)) return true;
    enemy.flush();
  }
  return false;
}

void check_end(SteppedRanks& ranks, const std::vector<RankCalls>& calls, const Script& script,
               bool spoiled) {
  for (const int rank : ranks.all()) {
    require(pool_bytes(ranks.transport(rank)) <= kLimits.pool_limit_bytes, "pool_limit_bytes");
    require(staging_bytes(ranks.transport(rank)) <= kStagingLimit, "memory for fragments");
    const auto& error = calls[static_cast<std::size_t>(rank)].error();
    if (!error) continue;
    const std::string text = error->what();
    require(text.find("internal check") == std::string::npos, text);
    require(script.lies() || text.find("rank ") != std::string::npos, "names no rank: " + text);
  }
  for (const RankCalls& one : calls) {
    for (std::size_t rank = 0; rank < one.gathered().size() && !script.lies(); ++rank) {
      const std::vector<std::byte> given(rank + 1, static_cast<std::byte>(rank));
      require(one.gathered()[rank] == given, "all_gather is wrong");
    }
  }
  const bool well = std::ranges::all_of(calls, [](const auto& one) { return !one.error(); });
  const ExchangeOptions options = choose_options(script);
  const bool exact = !options.wire_dispatch && !options.wire_combine &&
                     options.weights == WeightMode::at_combine &&
                     choose_calls(script).back() != Call::dispatch_backward;
  const bool damaged = spoiled && !options.checksum_payload;
  if (!well || !exact || damaged || script.lies()) return;
  for (const int rank : ranks.all()) {
    const std::string wrong = ranks.find_out_error(rank);
    require(wrong.empty(), "all ended well, and " + wrong);
  }
}

}  // namespace

void run(Input input) {
  const Script script = read_script(input);
  SteppedRanks ranks(choose_topology(script.head[0]), choose_options(script));
  for (const int rank : ranks.all()) set_limits(ranks.transport(rank), kLimits);
  ranks.number_x();
  Enemy enemy(ranks, script);
  std::vector<RankCalls> calls = testing::calls_of_all(ranks, choose_calls(script));
  bool ended = run_on(ranks, calls, enemy);
  require(ended || script.lies(), "a call has no end");
  if (!ended) {  // a library that lies can let others wait: they give up at their deadline
    for (RankCalls& one : calls) one.cancel("the deadline");
    ended = run_on(ranks, calls, enemy);
    require(ended, "a call that was given up has no end");
  }
  enemy.flush();
  testing::run(ranks, calls, kStepsOfFlush);
  check_end(ranks, calls, script, enemy.spoiled());
}

namespace {

/// Ranks refuse nothing, and send no poison, unless something else went wrong before.
std::vector<Event> with_cause(const Event& event) {
  if (event.type != wire::MessageType::poison) return {event};
  const Event cause{.type = wire::MessageType::metadata,
                    .action = Action::flip,
                    .at = wire::kMetadataHeaderBytes,
                    .value = {std::byte{1}}};
  return {cause, event};
}

/// A field that says how much comes, or for whom, at its place in docs/wire-formats.md.
struct Field {
  std::string name;
  wire::MessageType type = wire::MessageType::fragment;
  std::uint16_t at = 0;
};

std::vector<Field> fields() {
  using wire::MessageType;
  return {{"fragment_exchange", MessageType::fragment, 20},
          {"fragment_plan", MessageType::fragment, 24},
          {"fragment_ordinal", MessageType::fragment, 28},
          {"fragment_index", MessageType::fragment, 36},
          {"fragment_num_rows", MessageType::fragment, 40},
          {"fragment_payload_bytes", MessageType::fragment, 44},
          {"fragment_grant_plan", MessageType::fragment, 56},
          {"fragment_grant_ordinal", MessageType::fragment, 60},
          {"fragment_grant_fragments", MessageType::fragment, 64},
          {"metadata_exchange", MessageType::metadata, 20},
          {"metadata_plan", MessageType::metadata, 24},
          {"metadata_num_tokens", MessageType::metadata, 40},
          {"metadata_body_bytes", MessageType::metadata, 48},
          {"metadata_source", MessageType::metadata, 88},
          {"grant_exchange", MessageType::grant, 12},
          {"grant_plan", MessageType::grant, 16},
          {"grant_ordinal", MessageType::grant, 20},
          {"grant_fragments", MessageType::grant, 24},
          {"poison_exchange", MessageType::poison, 20},
          {"poison_plan", MessageType::poison, 24},
          {"poison_text_bytes", MessageType::poison, 36}};
}

}  // namespace

std::vector<Seed> seeds() {
  std::vector<Seed> made{{"as_sent", write_script({.head = {1, 0}, .events = {}})}};
  const auto add = [&made](const std::string& name, std::array<unsigned, kHeadBytes> head,
                           const Event& event) {
    made.push_back({name, write_script({.head = head, .events = with_cause(event)})});
  };
  const std::array<std::string, 4> types{"fragment", "metadata", "grant", "poison"};
  const std::array<std::string, kActions> actions{"flip",  "resize",        "repeat",
                                                  "hold",  "replay",        "other_kind",
                                                  "forge", "forge_resized", "make_up"};
  unsigned variant = 0;
  for (std::size_t type = 0; type < types.size(); ++type) {
    for (std::size_t action = 0; action < actions.size(); ++action, ++variant) {
      add(types[type] + "_" + actions[action], {variant % 128, variant % 3 == 0 ? variant % 64 : 0},
          {.type = static_cast<wire::MessageType>(type + 1),
           .place = type + 1 == types.size() ? 0 : static_cast<int>(variant % 3),
           .action = static_cast<Action>(action),
           .at = static_cast<std::uint16_t>(16 + variant),
           .value = {std::byte{1}, std::byte{0}, std::byte{0}, std::byte{0}}});
    }
  }
  for (const Field& field : fields()) {
    add(field.name, {1, 0},
        {.type = field.type,
         .action = Action::forge,
         .at = field.at,
         .value = {std::byte{0}, std::byte{0}, std::byte{0}, std::byte{0x40}}});
  }
  return made;
}

}  // namespace ferry::fuzz
