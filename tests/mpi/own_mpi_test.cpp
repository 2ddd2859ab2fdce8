// A program with an MPI of its own, as ferry/mpi.hpp promises it: two groups of ranks that are not
// neighbours, each with two exchanges, between the program's own calls of MPI; a communicator that
// is freed while its transport lives; exchanges that outlive MPI_Finalize; a forked child, another
// thread and a progress thread, which an MPI initialised by MPI_Init refuses. Run with 4 ranks.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"
#include "ferry/mpi.hpp"

namespace {

constexpr std::int64_t kHidden = 32;
constexpr std::int64_t kTokens = 5;
constexpr int kNumTopk = 2;
constexpr int kExperts = 6;

void require(bool condition, const std::string& what) {
  if (condition) return;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::printf("own_mpi_test: rank %d: %s\n", rank, what.c_str());
  std::fflush(stdout);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

/// One exchange of a group, and a layer through it: experts give back what they get.
class Layer {
 public:
  explicit Layer(ferry::Transport& transport)
      : rank_(transport.rank()),
        exchange_(transport,
                  ferry::Placement::contiguous(kExperts, transport.topology().num_ranks()),
                  {.hidden = kHidden, .dtype = ferry::DType::f32}) {}

  void run(float value) {
    std::vector<std::int32_t> ids;
    for (int i = 0; i < kTokens; ++i) {
      ids.push_back((i + rank_) % kExperts);
      ids.push_back((i + rank_ + 3) % kExperts);
    }
    const std::vector<float> weights(ids.size(), 0.5F);
    const std::vector<float> x(kTokens * kHidden, value);
    std::vector<float> out(x.size());
    const ferry::Plan plan = exchange_.plan(
        ferry::Routing::of(kTokens, kNumTopk, std::span<const std::int32_t>(ids), weights));
    const ferry::ExpertRows rows =
        exchange_.dispatch(plan, {x.data(), ferry::DType::f32, kTokens, kHidden});
    exchange_.combine(plan, rows.matrix(), {out.data(), ferry::DType::f32, kTokens, kHidden});
    for (const float sum : out) require(sum == value, "a sum is wrong");
  }

 private:
  int rank_;
  ferry::Exchange exchange_;
};

void require_allreduce(int rank, int size) {
  int sum = 0;
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  require(sum == size * (size - 1) / 2, "the program's own MPI_Allreduce is wrong");
}

template <typename Call>
ferry::ErrorCode code_of(const Call& call) {
  try {
    call();
  } catch (const ferry::Error& error) {
    return error.code();
  }
  require(false, "a call that cannot be was accepted");
  return ferry::ErrorCode::cancelled;
}

ferry::ErrorCode code_of(MPI_Comm comm, const ferry::mpi::AttachOptions& options) {
  return code_of([&] { ferry::mpi::attach(comm, options); });
}

// The child has the exchange's memory and none of the node's, and the ranks never hear of it.
void fork_a_child(Layer& layer, ferry::Transport& transport) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    try {
      layer.run(1);
    } catch (const ferry::Error& error) {
      { const Layer moved = std::move(layer); }  // and goes
      ::_exit(error.code() == ferry::ErrorCode::peer_failed ? 0 : 1);
    }
    ::_exit(2);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child was not refused");
  ferry::barrier(transport);
}

// MPI_Init gives no more than MPI_THREAD_FUNNELED.
void use_threads() {
  using ferry::ErrorCode;
  const auto transport = ferry::mpi::attach(MPI_COMM_SELF);
  Layer layer(*transport);
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level >= MPI_THREAD_SERIALIZED) return;
  require(code_of([&] { ferry::ProgressThread{*transport}; }) == ErrorCode::unsupported,
          "a progress thread on an MPI for one thread");
  ErrorCode code = ErrorCode::cancelled;
  std::thread([&] { code = code_of([&] { layer.run(1); }); }).join();
  require(code == ErrorCode::wrong_thread, "another thread on an MPI for one thread");
  layer.run(2);
}

void run(int rank, int size) {
  using ferry::ErrorCode;
  require(code_of(MPI_COMM_NULL, {}) == ErrorCode::invalid_argument, "MPI_COMM_NULL");
  require(code_of(MPI_COMM_WORLD, {.topology = ferry::Topology::uniform(1, size + 1)}) ==
              ErrorCode::invalid_argument,
          "a topology of another size");

  MPI_Comm group = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &group);
  // Each rank its own node: everything goes through MPI.
  static std::unique_ptr<ferry::Transport> transport =
      ferry::mpi::attach(group, {.topology = ferry::Topology::uniform(size / 2, 1)});
  MPI_Comm_free(&group);
  static Layer first(*transport);
  static Layer second(*transport);
  for (int i = 0; i < 10; ++i) {
    first.run(static_cast<float>(rank + i));
    require_allreduce(rank, size);
    second.run(static_cast<float>(2 * rank + i));
  }
  fork_a_child(second, *transport);
  // Another transport of the world beside it, found machines: one node.
  const auto world = ferry::mpi::attach(MPI_COMM_WORLD);
  require(world->topology().num_nodes() == 1, "one machine is more than one node");
  Layer(*world).run(7);
  first.run(3);
  use_threads();
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  run(rank, size);
  MPI_Finalize();
  if (rank == 0) std::printf("own_mpi_test: all sums are right\n");
  return 0;  // the static transport and its exchanges go now
}
