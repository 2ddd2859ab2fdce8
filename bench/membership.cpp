// How long memberships take to encode and to decode in the encodings that are chosen for them,
// beside raw lists, in the same run and by turns; and what the choice costs.
//
// One rank of T tokens, uniform routing, top-8 of 256 experts, and its membership for one of N
// nodes. `encode` and `decode` are time over that of raw lists, medians over the repeats; `bytes`
// and `entropy` are of the lists; `choose_us` is what the choice takes.
//
//   bench_membership

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include <benchmark/benchmark.h>

#include "base/clock.hpp"
#include "plan/experts.hpp"
#include "wire/membership_choice.hpp"

namespace ferry::bench {
namespace {

constexpr int kExperts = 256;
constexpr int kTopk = 8;
constexpr int kRepeats = 301;
constexpr int kBatch = 20;  // calls in a row: a clock does not tell one of them

plan::Membership make_membership(int num_nodes, std::int64_t num_tokens) {
  std::mt19937_64 rng(17);
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<std::int32_t> experts(kExperts);
  std::iota(experts.begin(), experts.end(), 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (int slot = 0; slot < kTopk; ++slot) {
      const auto other =
          static_cast<std::size_t>(slot) + rng() % (kExperts - static_cast<unsigned>(slot));
      std::swap(experts[static_cast<std::size_t>(slot)], experts[other]);
      ids.push_back(experts[static_cast<std::size_t>(slot)]);
      weights.push_back(static_cast<float>(rng() % 1000) / 1000);
    }
  }
  const Topology topology = Topology::uniform(num_nodes, 1);
  const plan::ExpertIndex index(topology, Placement::contiguous(kExperts, num_nodes));
  return plan::split_by_node(
      Routing::of(num_tokens, kTopk, std::span<const std::int32_t>(ids), weights), index,
      topology)[0];
}

double us_of(const std::function<void()>& work) {
  const double start = base::now_s();
  for (int i = 0; i < kBatch; ++i) work();
  return (base::now_s() - start) * 1e6 / kBatch;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// One way to write a membership.
struct Way {
  wire::IndexEncoding encoding;
  std::vector<std::byte> bytes{};
  std::vector<double> encode_us{};
  std::vector<double> decode_us{};
};

void run_case(benchmark::State& state) {
  const auto num_nodes = static_cast<int>(state.range(0));
  const std::int64_t num_tokens = state.range(1);
  const plan::Membership membership = make_membership(num_nodes, num_tokens);
  const wire::MembershipForm form{.num_columns = kExperts / num_nodes};
  const wire::MembershipLimits limits{static_cast<std::uint64_t>(num_tokens), kTopk, form};
  wire::MembershipHistory history;
  Way chosen{.encoding = wire::choose_encoding(membership, form, history)};
  Way raw{.encoding = {ListEncoding::raw, ListEncoding::raw}};
  plan::Membership decoded;
  std::vector<double> choose_us;
  for (auto _ : state) {
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      for (Way* way : {&raw, &chosen}) {
        way->encode_us.push_back(us_of([&] {
          way->bytes.clear();
          wire::encode_membership(membership, form, way->encoding, way->bytes);
        }));
        way->decode_us.push_back(us_of([&] {
          if (wire::decode_membership(way->bytes, limits, decoded)) {
            throw std::runtime_error("bench: a membership was refused");
          }
        }));
        if (decoded != membership) throw std::runtime_error("bench: another membership came back");
      }
      choose_us.push_back(us_of(
          [&] { benchmark::DoNotOptimize(wire::choose_encoding(membership, form, history)); }));
    }
  }
  const auto ratio = [&](std::vector<double> Way::*part) {
    return median(chosen.*part) / median(raw.*part);
  };
  state.counters["encode"] = ratio(&Way::encode_us);
  state.counters["decode"] = ratio(&Way::decode_us);
  state.counters["encode_us"] = median(chosen.encode_us);
  state.counters["decode_us"] = median(chosen.decode_us);
  state.counters["choose_us"] = median(choose_us);
  state.counters["bytes"] =
      static_cast<double>(wire::index_bytes(membership, form, chosen.encoding));
  state.counters["raw"] = static_cast<double>(wire::index_bytes(membership, form, raw.encoding));
  state.counters["entropy"] = wire::index_entropy_bits(membership, form) / 8;
  state.SetLabel(std::string(to_string(chosen.encoding.tokens)) + ", " +
                 std::string(to_string(chosen.encoding.experts)));
}

BENCHMARK(run_case)
    ->Name("membership")
    ->ArgNames({"N", "T"})
    ->ArgsProduct({{2, 4, 8, 32}, {8, 64, 4096}})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ferry::bench

BENCHMARK_MAIN();
