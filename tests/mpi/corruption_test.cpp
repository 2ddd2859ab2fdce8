// Damage below Ferry: this program stands between Ferry and MPI, by MPI's profiling interface, and
// damages messages after their checksums were computed. Each of them is found, and every rank is
// told who sent it. Run with 4 ranks.

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "ferry/mpi.hpp"
#include "support/damage.hpp"
#include "wire/headers.hpp"

namespace {

using ferry::support::Damage;
using ferry::wire::MessageType;

constexpr int kRanks = 4;
constexpr std::uint64_t kSeed = 31'337;
constexpr std::int64_t kTokens = 4;
constexpr std::int64_t kHidden = 64;
// Where a header can be trusted one call ends, and others go on beside it; where not, the job ends,
// and the next one takes its time to begin.
constexpr int kCallsAtOnce = 32;
constexpr int kBatchesOfJob = 17;
constexpr int kJobsOfCalls = 18;
constexpr int kJobsThatEnd = 208;
constexpr int kMessages = kCallsAtOnce * kBatchesOfJob * kJobsOfCalls + kJobsThatEnd;

[[noreturn]] void fail(const std::string& what) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::printf("corruption_test: rank %d: %s\n", rank, what.c_str());
  std::fflush(stdout);
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

/// A message that is to be damaged: metadata or the first fragment of a plan, by its sender.
struct Aim {
  int source = 0;
  MessageType type = MessageType::fragment;
  Damage damage = Damage::bit;
  bool in_header = false;
};

/// What the network of this rank does.
struct Network {
  std::map<std::uint32_t, Aim> aims;  ///< by plan
  int damaged = 0;
  std::mt19937_64 random;
  std::deque<std::vector<std::byte>> kept;  ///< MPI reads them until their sends are done
};

Network& network() {
  static Network made;
  return made;
}

/// The plan that a message is for, if it is one that an aim may mean.
std::optional<std::uint32_t> plan_of(std::span<const std::byte> bytes, MessageType& type) {
  namespace wire = ferry::wire;
  wire::FragmentHeader fragment;
  wire::MetadataHeader metadata;
  if (bytes.size() > wire::kFragmentHeaderBytes &&
      !wire::decode(bytes.first(wire::kFragmentHeaderBytes), fragment)) {
    type = MessageType::fragment;
    if (fragment.call.kind == wire::OpKind::dispatch) return fragment.call.plan;
  }
  if (bytes.size() > wire::kMetadataHeaderBytes &&
      !wire::decode(bytes.first(wire::kMetadataHeaderBytes), metadata)) {
    type = MessageType::metadata;
    if (metadata.call.kind == wire::OpKind::plan) return metadata.call.plan;
  }
  return std::nullopt;
}

/// The bytes that leave in place of a message.
std::span<const std::byte> damage(std::span<const std::byte> bytes) {
  MessageType type{};
  const auto plan = plan_of(bytes, type);
  const auto aim = plan ? network().aims.find(*plan) : network().aims.end();
  if (aim == network().aims.end() || aim->second.type != type) return bytes;
  std::vector<std::byte>& copy = network().kept.emplace_back(bytes.begin(), bytes.end());
  const std::size_t header = type == MessageType::fragment ? ferry::wire::kFragmentHeaderBytes
                                                           : ferry::wire::kMetadataHeaderBytes;
  const std::span all(copy);
  ferry::support::damage(aim->second.in_header ? all.first(header) : all.subspan(header),
                         aim->second.damage, network().random);
  network().aims.erase(aim);
  ++network().damaged;
  return copy;
}

std::mt19937_64& shared_random() {
  static std::mt19937_64 random(kSeed);  // the same on every rank
  return random;
}

Aim draw_aim(bool in_header) {
  std::mt19937_64& random = shared_random();
  Aim aim;
  aim.source = static_cast<int>(random() % kRanks);
  aim.type = random() % 2 == 0 ? MessageType::fragment : MessageType::metadata;
  aim.damage = ferry::support::kDamages[random() % std::size(ferry::support::kDamages)];
  aim.in_header = in_header;
  return aim;
}

/// One layer: its calls, as far as they go well.
struct Layer {
  ferry::Pending<ferry::Plan> planning;
  std::optional<ferry::Plan> plan{};
  std::optional<ferry::Pending<ferry::ExpertRows>> dispatching{};
  std::optional<ferry::ExpertRows> rows{};
  std::optional<ferry::Pending<void>> combining{};
  std::optional<ferry::Error> error{};
};

/// One job: a transport, an exchange, and layers on it.
class Job {
 public:
  Job()
      : transport_(ferry::mpi::attach(MPI_COMM_WORLD,
                                      {.topology = ferry::Topology::uniform(2, kRanks / 2)})),
        exchange_(*transport_, ferry::Placement::contiguous(kRanks, kRanks),
                  {.hidden = kHidden, .dtype = ferry::DType::f32}),
        x_(kTokens * kHidden, 1.0F),
        out_(x_.size()) {
    ferry::set_limits(*transport_, {.deadline_s = 30});
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (int rank = 0; rank < kRanks; ++rank) ids_.push_back(rank);  // all need all
    }
  }

  /// Makes as many layers at once as there are aims. Each must fail on every rank.
  void run(const std::vector<Aim>& aims) {
    for (const Aim& aim : aims) {
      if (aim.source == transport_->rank()) network().aims[next_plan_] = aim;
      ++next_plan_;
    }
    const auto routing = ferry::Routing::of(kTokens, kRanks, std::span<const std::int32_t>(ids_));
    std::vector<Layer> layers;
    for (std::size_t i = 0; i < aims.size(); ++i) {
      layers.push_back({.planning = exchange_.start_plan(routing)});
    }
    for (Layer& layer : layers) {
      go_on(layer, [&] {
        layer.plan = layer.planning.wait();
        layer.dispatching =
            exchange_.start_dispatch(*layer.plan, {x_.data(), ferry::DType::f32, kTokens, kHidden});
      });
    }
    for (Layer& layer : layers) {
      go_on(layer, [&] {
        layer.rows.emplace(layer.dispatching->wait());
        layer.combining = exchange_.start_combine(
            *layer.plan, layer.rows->matrix(), {out_.data(), ferry::DType::f32, kTokens, kHidden});
      });
    }
    for (std::size_t i = 0; i < aims.size(); ++i) {
      go_on(layers[i], [&] { layers[i].combining->wait(); });
      check(layers[i], aims[i]);
    }
  }

  /// So many refusals at once are more than the ranks of a node can write down for each other: none
  /// leaves before all are read.
  void meet() { ferry::barrier(*transport_); }

 private:
  static void go_on(Layer& layer, const std::function<void()>& step) {
    if (layer.error) return;
    try {
      step();
    } catch (const ferry::Error& error) {
      layer.error = error;
    }
  }

  static void check(const Layer& layer, const Aim& aim) {
    const std::string damage(ferry::support::to_string(aim.damage));
    if (!layer.error) fail(damage + " was not found");
    const std::string text = layer.error->what();
    const auto code =
        aim.in_header ? ferry::ErrorCode::peer_failed : ferry::ErrorCode::corrupt_message;
    if (layer.error->code() != code ||
        text.find("rank " + std::to_string(aim.source)) == std::string::npos) {
      fail(damage + " of rank " + std::to_string(aim.source) + " gave: " + text);
    }
  }

  std::unique_ptr<ferry::Transport> transport_;
  ferry::Exchange exchange_;
  std::vector<std::int32_t> ids_;
  std::vector<float> x_;
  std::vector<float> out_;
  std::uint32_t next_plan_ = 0;
};

void run_calls() {
  Job job;
  for (int batch = 0; batch < kBatchesOfJob; ++batch) {
    std::vector<Aim> aims;
    for (int i = 0; i < kCallsAtOnce; ++i) aims.push_back(draw_aim(false));
    job.run(aims);
  }
  job.meet();
}

void end_job() {
  Job job;
  job.run({draw_aim(true)});
}

}  // namespace

extern "C" int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int target, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  std::span bytes(static_cast<const std::byte*>(buffer), static_cast<std::size_t>(count));
  if (type == MPI_BYTE) bytes = damage(bytes);
  return PMPI_Isend(bytes.data(), count, type, target, tag, comm, request);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  network().random.seed(kSeed + static_cast<std::uint64_t>(rank));
  for (int i = 0; i < kJobsOfCalls; ++i) run_calls();
  for (int i = 0; i < kJobsThatEnd; ++i) end_job();
  int damaged = 0;
  MPI_Allreduce(&network().damaged, &damaged, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (damaged != kMessages) fail(std::to_string(damaged) + " messages were damaged");
  if (rank == 0) {
    std::printf("corruption_test: %d of %d damaged messages were found\n", damaged, kMessages);
  }
  MPI_Finalize();
  return 0;
}
