// Cases about layouts and weight modes that cannot be: what the constructor refuses, ranks that
// disagree about one of the options, extra bytes and outputs of a wrong size.

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::Failure;
using support::failure_of;

using Failures = std::vector<std::optional<Failure>>;

class LayoutRefusals : public Conformance {
 protected:
  int culprit() const { return num_ranks() - 1; }
  Layer layer(const Mode& mode) const {
    const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 2};
    return {with_mode(group(spec.num_experts), mode), make_all_routing(spec, ragged(6), 3)};
  }
  static void expect_words(const std::string& text, const std::vector<std::string>& words) {
    for (const std::string& word : words) {
      EXPECT_NE(text.find(word), std::string::npos) << "no '" << word << "' in: " << text;
    }
  }
};

/// Options that no exchange can have, and words that the error must hold.
struct BadOptions {
  std::function<void(ExchangeOptions&)> spoil;
  std::vector<std::string> words;
};

std::vector<BadOptions> bad_options() {
  const auto token_major = [](ExchangeOptions& o) {
    o.layout = Layout::token_major;
    o.weights = WeightMode::none;
    o.strategy = Strategy::node_dedup;
  };
  const auto alignment = [](int rows) {
    return [rows](ExchangeOptions& o) { o.row_alignment = rows; };
  };
  const auto extra = [](int bytes) {
    return [bytes](ExchangeOptions& o) { o.extra_bytes = bytes; };
  };
  return {
      {[=](ExchangeOptions& o) {
         token_major(o);
         o.strategy = Strategy::flat;
       },
       {"token_major", "flat"}},
      {[=](ExchangeOptions& o) {
         token_major(o);
         o.weights = WeightMode::at_combine;
       },
       {"token_major", "at_combine", "at_expert", "none"}},
      {[=](ExchangeOptions& o) {
         token_major(o);
         o.row_alignment = 2;
       },
       {"token_major", "row_alignment", "2"}},
      {alignment(0), {"row_alignment", "0", "65535"}},
      {alignment(-1), {"row_alignment", "-1", "65535"}},
      {alignment(65536), {"row_alignment", "65536", "65535"}},
      {extra(-4), {"extra_bytes", "-4"}},
      {extra(6), {"extra_bytes", "6", "4"}},
      {extra(-3), {"extra_bytes", "-3"}},
  };
}

TEST_P(LayoutRefusals, OfOptionsByTheConstructor) {
  const Layer good = layer({});
  const std::vector<BadOptions> cases = bad_options();
  std::vector<Failures> failures(cases.size(), Failures(static_cast<std::size_t>(num_ranks())));
  run([&](RankContext& context) -> Task {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      ExchangeOptions options = options_of(good.group());
      cases[i].spoil(options);
      try {
        const Exchange exchange(context.transport(), good.group().placement,
                                {good.group().hidden, good.group().dtype}, options);
      } catch (...) {
        failures[i][static_cast<std::size_t>(context.rank())] =
            support::describe_exception(std::current_exception());
      }
    }
    // Nothing of a refused exchange is left behind.
    Exchange exchange = make_exchange(context, good.group());
    co_await run_layer(context, exchange, good, {});
  });
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(fmt::format("{} {}", cases[i].words.front(), cases[i].words[1]));
    support::gather_by_rank(failures[i]);
    for (const std::optional<Failure>& failure : failures[i]) {
      ASSERT_TRUE(failure.has_value()) << "accepted";
      EXPECT_TRUE(failure->code == ErrorCode::invalid_argument ||
                  failure->code == ErrorCode::unsupported)
          << failure->text;
      expect_words(failure->text, cases[i].words);
    }
  }
}

/// An option that the last rank wants otherwise.
struct Disagreement {
  std::string name;
  Mode others;
  Mode last_rank;
  std::string value_of_others;
  std::string value_of_last_rank;
};

std::vector<Disagreement> disagreements() {
  constexpr Layout kExpert = Layout::expert_major;
  constexpr WeightMode kNone = WeightMode::none;
  return {
      {"layout", {kExpert, kNone}, {Layout::token_major, kNone}, "expert_major", "token_major"},
      {"weights", {kExpert, kNone}, {kExpert, WeightMode::at_expert}, "none", "at_expert"},
      {"weights", {}, {kExpert, kNone}, "at_combine", "none"},
      {"row_alignment", {}, {kExpert, WeightMode::at_combine, 8}, "1", "8"},
      {"extra_bytes", {}, {kExpert, WeightMode::at_combine, 1, 12}, "0", "12"},
      {"row_sources", {}, {kExpert, WeightMode::at_combine, 1, 0, true}, "false", "true"},
  };
}

TEST_P(LayoutRefusals, OfRanksThatDisagreeNameBothValues) {
  for (const Disagreement& disagreement : disagreements()) {
    if (GetParam().strategy == Strategy::flat && disagreement.name == "layout") continue;
    SCOPED_TRACE(disagreement.name + " " + disagreement.value_of_last_rank);
    const Layer good = layer(disagreement.others);
    const Layer other = layer(disagreement.last_rank);
    Failures failures(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      const bool differs = context.rank() == culprit();
      Exchange exchange = make_exchange(context, (differs ? other : good).group());
      failures[static_cast<std::size_t>(context.rank())] =
          co_await failure_of([&] { return exchange.start_plan(good.routing(context.rank())); });
      Exchange agreed = make_exchange(context, good.group());
      co_await run_layer(context, agreed, good, {.check_bytes = false});
    });
    support::gather_by_rank(failures);
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      ASSERT_TRUE(failures[rank].has_value()) << "rank " << rank << " saw no difference";
      const std::string& text = failures[rank]->text;
      EXPECT_EQ(failures[rank]->code, ErrorCode::mismatch) << text;
      EXPECT_EQ(text, failures.front()->text) << "rank " << rank;
      expect_words(text, {disagreement.name, disagreement.value_of_others,
                          disagreement.value_of_last_rank, fmt::format("rank {}", culprit())});
    }
  }
}

/// What one rank gives dispatch and combine.
struct Operands {
  std::vector<std::byte> extra;
  ConstMatrix y;
};
struct BadOperand {
  std::string name;
  Mode mode;
  bool in_dispatch;
  std::function<void(Operands&, const Plan&)> spoil;
};

std::vector<BadOperand> bad_operands() {
  constexpr Layout kExpert = Layout::expert_major;
  const Mode extra{kExpert, WeightMode::at_combine, 1, 12};
  return {
      {"no extra bytes", extra, true, [](Operands& o, const Plan&) { o.extra.clear(); }},
      {"one extra byte less", extra, true, [](Operands& o, const Plan&) { o.extra.pop_back(); }},
      {"one extra byte more", extra, true, [](Operands& o, const Plan&) { o.extra.push_back({}); }},
      {"those of a token more", extra, true,
       [](Operands& o, const Plan&) { o.extra.resize(o.extra.size() + 12); }},
      {"extra bytes that are not in the options",
       {},
       true,
       [](Operands& o, const Plan&) { o.extra.resize(12); }},
      {"y without alignment rows",
       {kExpert, WeightMode::at_combine, 64},
       false,
       [](Operands& o, const Plan& plan) { o.y.rows = plan.summary().rows_received; }},
  };
}

TEST_P(LayoutRefusals, OfAnOperandOfAWrongSize) {
  for (const BadOperand& bad : bad_operands()) {
    SCOPED_TRACE(bad.name);
    const Layer good = layer(bad.mode);
    Failures first(static_cast<std::size_t>(num_ranks()));
    Failures last(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      const auto rank = static_cast<std::size_t>(context.rank());
      Exchange exchange = make_exchange(context, good.group());
      RankLayer memory(context, good, 5);
      const Plan plan = co_await exchange.start_plan(memory.routing());
      GuardedMatrix y(plan.num_rows(), good.group().hidden, good.group().dtype);
      const Operands right{{memory.extra().begin(), memory.extra().end()}, y.matrix()};
      Operands mine = right;
      if (context.rank() == culprit()) bad.spoil(mine, plan);
      const auto dispatch = [&] { return exchange.start_dispatch(plan, memory.x(), mine.extra); };
      const auto combine = [&] { return exchange.start_combine(plan, mine.y, memory.out()); };
      if (bad.in_dispatch) {
        first[rank] = co_await failure_of(dispatch);
      } else {
        co_await failure_of(dispatch);
        first[rank] = co_await failure_of(combine);
      }
      // The first call may end well on a rank that needed nothing from the culprit. The word gets
      // round while ranks do other things; then the plan is of no use to anybody.
      mine = right;
      for (int repeat = 0; repeat < 3; ++repeat) {
        co_await support::meet();
        co_await support::pause(2000);
        last[rank] = co_await failure_of(combine);
      }
      co_await run_layer(context, exchange, good, {.check_bytes = false});
    });
    for (Failures* const seen : {&first, &last}) support::gather_by_rank(*seen);
    const auto& own = first[static_cast<std::size_t>(culprit())];
    ASSERT_TRUE(own.has_value()) << "accepted";
    EXPECT_EQ(own->code, ErrorCode::invalid_argument) << own->text;
    expect_words(own->text, {fmt::format("rank {}", culprit()), bad.in_dispatch ? "extra" : "y"});
    for (std::size_t rank = 0; rank < last.size(); ++rank) {
      ASSERT_TRUE(last[rank].has_value()) << "rank " << rank << " learned nothing";
      EXPECT_EQ(last[rank]->text, own->text) << "rank " << rank;
      EXPECT_EQ(last[rank]->code, own->code) << "rank " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, LayoutRefusals,
                         ::testing::ValuesIn(few_points({"1x8", "2x4", "8x1", "1+2+4"})), name_of);

}  // namespace
}  // namespace ferry::conformance
