// Prints the CPU time that one rank spends on a plan: T = 4096, k = 8, E = 256, uniform routing.
// Minimum of several repeats, so that other work on the machine does not count.

#include <algorithm>
#include <cstdlib>
#include <ctime>

#include <fmt/format.h>

#include "plan/rank_plan.hpp"

namespace {

using namespace ferry;

double cpu_us() { return 1e6 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

template <typename Work>
double best_us(int repeats, const Work& work) {
  double best = 1e30;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const double start = cpu_us();
    work();
    best = std::min(best, cpu_us() - start);
  }
  return best;
}

std::vector<std::int64_t> make_ids(std::int64_t count, std::uint64_t state) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  for (std::int64_t& id : ids) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    id = static_cast<std::int64_t>((state >> 33) % 256);
  }
  return ids;
}

void measure(const Topology& topology, std::int64_t num_tokens) {
  const plan::ExpertIndex experts(topology, Placement::contiguous(256, topology.num_ranks()));
  const auto num_ranks = static_cast<std::size_t>(topology.num_ranks());
  std::vector<plan::Membership> of_rank(num_ranks);  // each for node 0
  plan::ColumnCounts counts{.num_columns = experts.num_columns(0), .values = {}};
  std::vector<const plan::Membership*> sources;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const std::vector<std::int64_t> ids = make_ids(num_tokens * 8, rank + 1);
    of_rank[rank] = plan::split_by_node(Routing::of(num_tokens, 8, ids), experts, topology)[0];
    const auto row = plan::count_columns(of_rank[rank], counts.num_columns);
    counts.values.insert(counts.values.end(), row.begin(), row.end());
    sources.push_back(&of_rank[rank]);
  }
  const std::vector<std::int64_t> ids = make_ids(num_tokens * 8, 1);
  const Routing routing = Routing::of(num_tokens, 8, ids);
  const double check_us = best_us(9, [&] {
    if (plan::find_routing_error(routing, 256, 0)) std::abort();
  });
  std::vector<plan::Membership> own;
  const double split_us =
      best_us(9, [&] { own = plan::split_by_node(routing, experts, topology); });
  fmt::print("{:>8} T={:<6} check {:>5.0f} us, split {:>5.0f} us, plan", topology.describe(),
             num_tokens, check_us, split_us);
  for (const plan::StrategyInfo& strategy : plan::strategies()) {
    const plan::PlanContext context{topology, experts, strategy.id, 512};
    const double plan_us =
        best_us(9, [&] { plan::make_rank_plan(context, 0, own, sources, counts); });
    fmt::print("  {} {:.0f}", strategy.name, plan_us);
  }
  fmt::print(" us\n");
}

}  // namespace

int main() {
  for (const std::int64_t num_tokens : {4096, 8192}) {
    for (const auto& [nodes, ranks] : {std::pair{1, 8}, {2, 4}, {4, 2}, {8, 1}, {128, 8}}) {
      measure(Topology::uniform(nodes, ranks), num_tokens);
    }
  }
}
