// Sub-groups of processes: two expert-parallel groups and two data-parallel ones of the same ranks,
// made again and again; a rank that does not come, or comes with another list, ends in an error and
// never in a hang, and the next try is as good as the first. Run with 4 ranks.

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "ferry/mpi.hpp"

namespace {

constexpr std::int64_t kHidden = 32;
constexpr std::int64_t kTokens = 5;

void require(bool condition, const std::string& what) {
  if (condition) return;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::printf("subgroup_test: rank %d: %s\n", rank, what.c_str());
  std::fflush(stdout);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

/// Every rank of `members` holds one expert, which adds its rank in the job.
void run_layer(ferry::Transport& transport, int job_rank, const std::vector<int>& members) {
  const int size = transport.topology().num_ranks();
  require(size == static_cast<int>(members.size()), "a sub-group of another size");
  ferry::Exchange exchange(transport, ferry::Placement::contiguous(size, size),
                           {.hidden = kHidden, .dtype = ferry::DType::f32});
  std::vector<std::int32_t> ids;
  for (int token = 0; token < kTokens; ++token) ids.push_back(token % size);
  const std::vector<float> weights(ids.size(), 1.0F);
  const std::vector<float> x(kTokens * kHidden, 100.0F * static_cast<float>(job_rank));
  std::vector<float> out(x.size());
  const ferry::Plan plan =
      exchange.plan(ferry::Routing::of(kTokens, 1, std::span<const std::int32_t>(ids), weights));
  const ferry::ExpertRows rows =
      exchange.dispatch(plan, {x.data(), ferry::DType::f32, kTokens, kHidden});
  for (std::int64_t row = 0; row < rows.num_rows(); ++row) {
    auto* const values = reinterpret_cast<float*>(rows.matrix().row(row));
    for (int i = 0; i < kHidden; ++i) values[i] += static_cast<float>(job_rank);
  }
  exchange.combine(plan, rows.matrix(), {out.data(), ferry::DType::f32, kTokens, kHidden});
  for (int token = 0; token < kTokens; ++token) {
    const int visited = members[static_cast<std::size_t>(token % size)];
    require(out[static_cast<std::size_t>(token * kHidden)] ==
                100.0F * static_cast<float>(job_rank) + static_cast<float>(visited),
            "a sum is wrong");
  }
}

std::optional<ferry::ErrorCode> code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ferry::Error& error) {
    return error.code();
  }
  return std::nullopt;
}

void run_groups(ferry::Transport& all) {
  const int rank = all.rank();
  const std::vector<int> pair = rank < 2 ? std::vector{0, 1} : std::vector{2, 3};
  const std::vector<int> rail = rank % 2 == 0 ? std::vector{2, 0} : std::vector{3, 1};
  for (int round = 0; round < 3; ++round) {
    const auto ep = all.subgroup(pair);
    const auto dp = all.subgroup(rail);
    const auto ep_again = all.subgroup(pair);
    run_layer(*ep_again, rank, pair);
    run_layer(*dp, rank, rail);
    run_layer(*ep, rank, pair);
    run_layer(all, rank, {0, 1, 2, 3});
    const auto alone = all.subgroup({rank});
    run_layer(*alone, rank, {rank});
  }
}

void run_failures(ferry::Transport& all) {
  const int rank = all.rank();
  constexpr double kDeadline_s = 0.5;
  // Rank 2 does not come. All lists that it is missing from end; then all of them come.
  if (rank != 2) {
    const auto code = code_of([&] { all.subgroup({0, 1, 2, 3}, kDeadline_s); });
    require(code == ferry::ErrorCode::timeout, "a sub-group without one of its ranks");
  }
  ferry::barrier(all);
  if (rank == 1) {  // the first of the list is the one who does not come
    const auto code = code_of([&] { all.subgroup({0, 1}, kDeadline_s); });
    require(code == ferry::ErrorCode::timeout, "a sub-group without its first rank");
  }
  ferry::barrier(all);
  // Rank 0 leads two sub-groups, and rank 1 comes to the one of them that is not called now.
  if (rank != 3) {
    const auto code = code_of([&] {
      all.subgroup(rank == 1 ? std::vector{0, 1} : std::vector{0, 1, 2}, kDeadline_s);
    });
    require(code == (rank == 1 ? ferry::ErrorCode::mismatch : ferry::ErrorCode::timeout),
            "two lists made one sub-group");
  }
  ferry::barrier(all);
  require(code_of([&] { all.subgroup({(rank + 1) % 4}); }) == ferry::ErrorCode::invalid_argument,
          "a sub-group without the caller");
  run_layer(all, rank, {0, 1, 2, 3});
}

// Rank 3 ends the job; the others wait in sub-groups of their own.
void run_abort(const ferry::mpi::AttachOptions& options) {
  const auto all = ferry::mpi::attach(MPI_COMM_WORLD, options);
  std::unique_ptr<ferry::Transport> part;
  if (all->rank() != 3) part = all->subgroup({0, 1, 2});
  MPI_Barrier(MPI_COMM_WORLD);
  if (all->rank() == 3) all->abort("rank 3 has had enough");
  if (all->rank() >= 2) return;  // rank 2 never comes
  require(code_of([&] { ferry::barrier(*part); }) == ferry::ErrorCode::peer_failed,
          "a wait in a sub-group outlived the job");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (const bool split : {false, true}) {
    ferry::mpi::AttachOptions options;
    if (split) options.topology = ferry::Topology::uniform(2, 2);
    const auto all = ferry::mpi::attach(MPI_COMM_WORLD, options);
    run_groups(*all);
    run_failures(*all);
    run_groups(*all);
  }
  run_abort({});
  MPI_Barrier(MPI_COMM_WORLD);
  ferry::mpi::AttachOptions split;
  split.topology = ferry::Topology::uniform(2, 2);
  run_abort(split);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) std::printf("subgroup_test: all sums are right\n");
  MPI_Finalize();
  return 0;
}
