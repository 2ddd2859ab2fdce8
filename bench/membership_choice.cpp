// How good the choice of encodings for a plan's lists is, and what it costs: tables of
// docs/wire-formats.md.
//
//   bench_membership_choice                lists over their entropy, and the choice's share of an
//                                          exchange that is timed in the same run
//   bench_membership_choice TRACE...       lists over the best in hindsight, of each trace

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/clock.hpp"
#include "ferry/ferry.hpp"
#include "tools/index_replay.hpp"

namespace ferry::bench {
namespace {

using tools::ListBytes;
using tools::ReplayShape;

constexpr int kExperts = 256;
constexpr int kTopk = 8;
constexpr std::array kPatterns{"uniform", "group:8,4", "zipf:0.5", "zipf:1", "zipf:1.5"};
constexpr std::array kNodes{2, 4, 8, 16};

support::RoutingData make_routing(const std::string& pattern, std::int64_t num_tokens) {
  const std::vector<std::int64_t> tokens{num_tokens};
  return tools::generate_routing(tools::parse_routing(pattern), {kExperts, kTopk}, tokens, 11)
      .front();
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

void print_entropy() {
  fmt::print(
      "lists over their entropy, E = {}, k = {}\n\n| routing | T | 2 nodes | 4 | 8 | 16 |\n"
      "|---|---|---|---|---|---|\n",
      kExperts, kTopk);
  for (const char* const pattern : kPatterns) {
    const support::RoutingData all = make_routing(pattern, 4096);
    for (const std::int64_t num_tokens : {1, 8, 64, 4096}) {
      fmt::print("| {} | {} |", pattern, num_tokens);
      for (const int num_nodes : kNodes) {
        ListBytes lists;
        tools::replay(all, {kExperts, num_nodes}, num_tokens, all.num_tokens,
                      [&lists](const ListBytes& message) { lists += message; });
        fmt::print(" {:.2f} |", lists.chosen / lists.entropy);
      }
      fmt::print("\n");
    }
  }
}

struct Cost {
  std::vector<double> exchange_us;
  std::vector<double> choice_us;  ///< of all messages of a rank
};

// The choice is timed between exchanges of the same routing.
Cost measure_cost(int num_nodes, std::int64_t num_tokens, std::int64_t hidden) {
  constexpr int kRepeats = 31;
  constexpr int kBatch = 20;  // a clock does not tell one of them
  const support::RoutingData routing = make_routing("uniform", num_tokens);
  const ReplayShape shape{kExperts, num_nodes};
  const std::vector<plan::Membership> memberships = tools::remote(routing, shape);
  std::vector<wire::MembershipHistory> histories(memberships.size());
  Cost cost;
  threads::run({.nodes = num_nodes, .ranks_per_node = 1}, [&](Transport& transport) {
    Exchange exchange(transport, Placement::contiguous(kExperts, num_nodes),
                      {.hidden = hidden, .dtype = DType::bf16});
    std::vector<std::uint16_t> x(static_cast<std::size_t>(num_tokens * hidden));
    std::vector<std::uint16_t> out(x.size());
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const double start = base::now_s();
      const Plan plan = exchange.plan(routing.view());
      const ExpertRows rows = exchange.dispatch(plan, {x.data(), DType::bf16, num_tokens, hidden});
      exchange.combine(plan, rows.matrix(), {out.data(), DType::bf16, num_tokens, hidden});
      const double middle = base::now_s();
      if (transport.rank() != 0) continue;
      for (int i = 0; i < kBatch; ++i) {
        for (std::size_t m = 0; m < memberships.size(); ++m) {
          volatile const auto chosen =
              wire::choose_encoding(memberships[m], shape.form(), histories[m]).tokens;
          (void)chosen;
        }
      }
      const double end = base::now_s();
      if (repeat == 0) continue;
      cost.exchange_us.push_back((middle - start) * 1e6);
      cost.choice_us.push_back((end - middle) * 1e6 / kBatch);
    }
  });
  return cost;
}

// Ranks share the cores, so what each of them adds to the time that passes is added for all.
void print_cost() {
  fmt::print(
      "\nthe choice beside plan, dispatch and combine on threads, bf16, one rank per node\n\n"
      "| nodes | T | hidden | exchange, us | choice, us | share |\n"
      "|---|---|---|---|---|---|\n");
  for (const int num_nodes : {2, 8}) {
    for (const std::int64_t num_tokens : {1, 8, 64, 1024}) {
      for (const std::int64_t hidden : {256, 2048}) {
        const Cost cost = measure_cost(num_nodes, num_tokens, hidden);
        const double exchange = median(cost.exchange_us);
        const double choice = median(cost.choice_us);
        const int cores =
            std::min(num_nodes, static_cast<int>(std::thread::hardware_concurrency()));
        fmt::print("| {} | {} | {} | {:.0f} | {:.2f} | {:.3f} % |\n", num_nodes, num_tokens, hidden,
                   exchange, choice, 100 * choice / exchange * num_nodes / cores);
      }
    }
  }
}

/// Ratios to the best in hindsight.
struct Regrets {
  std::vector<double> layers;  ///< all messages of a layer together
  double worst_message = 1;
  ListBytes all;

  void add(const tools::Trace& trace, const ReplayShape& shape, std::int64_t num_tokens) {
    for (int layer = 0; layer < trace.info().num_layers; ++layer) {
      ListBytes lists;
      tools::replay(tools::layer_routing(trace, layer), shape, num_tokens, trace.info().num_tokens,
                    [&](const ListBytes& message) {
                      lists += message;
                      worst_message = std::max(worst_message, message.regret());
                    });
      layers.push_back(lists.regret());
      all += lists;
    }
  }
};

void print_regrets(const std::vector<tools::Trace>& traces) {
  fmt::print(
      "| T | nodes | all | worst layer | worst message | over entropy |\n"
      "|---|---|---|---|---|---|\n");
  std::vector<double> layers;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  for (const tools::Trace& trace : traces) {
    shortest = std::min(shortest, trace.info().num_tokens);
  }
  for (const std::int64_t num_tokens : {1, 8, 64, 512, 1024, 4096, 8192}) {
    if (num_tokens > shortest) break;
    for (const int num_nodes : kNodes) {
      Regrets regrets;
      for (const tools::Trace& trace : traces) {
        regrets.add(trace, {trace.info().num_experts, num_nodes}, num_tokens);
      }
      layers.insert(layers.end(), regrets.layers.begin(), regrets.layers.end());
      fmt::print("| {} | {} | {:.3f} | {:.3f} | {:.2f} | {:.2f} |\n", num_tokens, num_nodes,
                 regrets.all.regret(), std::ranges::max(regrets.layers), regrets.worst_message,
                 regrets.all.chosen / regrets.all.entropy);
    }
  }
  double sum = 0;
  for (const double layer : layers) sum += layer;
  fmt::print("\n{} layers: mean {:.3f}, worst {:.3f}\n", layers.size(),
             sum / static_cast<double>(layers.size()), std::ranges::max(layers));
}

}  // namespace
}  // namespace ferry::bench

int main(int count, char** arguments) {
  if (count == 1) {
    ferry::bench::print_entropy();
    ferry::bench::print_cost();
    return 0;
  }
  std::vector<ferry::tools::Trace> traces;
  for (int i = 1; i < count; ++i) traces.push_back(ferry::tools::Trace::load(arguments[i]));
  ferry::bench::print_regrets(traces);
}
