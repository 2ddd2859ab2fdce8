// Starts and ends the ranks of threads::run. The first failure ends the job of all. How messages
// travel is in threads_transport.hpp, the model of links with a rate in link_model.hpp.

#include "ferry/threads.hpp"

#include <sys/prctl.h>

#include <cmath>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "ferry/error.hpp"
#include "transport/threads_transport.hpp"

namespace ferry::threads {

namespace {

using detail::ThreadsTransport;
using detail::ThreadsWorld;

// Sleeps of the calling thread end when they should, not 50 us later.
void sharpen_sleeps() { ::prctl(PR_SET_TIMERSLACK, 1UL); }

void run_rank(const std::shared_ptr<ThreadsWorld>& shared, int rank,
              const std::function<void(Transport&)>& body) {
  ThreadsWorld& world = *shared;
  sharpen_sleeps();
  try {
    ThreadsTransport transport(shared, rank);
    try {
      body(transport);
      transport.attachment.reset();
    } catch (...) {
      world.fail(rank, std::current_exception());
    }
  } catch (...) {
    world.fail(rank, std::current_exception());
  }
}

Topology topology_of(const Options& options) {
  if (options.topology) {
    return *options.topology;
  }
  if (options.nodes < 1 || options.ranks_per_node < 1) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("threads::run: nodes = {}, ranks_per_node = {}; allowed: 1 or more of "
                            "each; fix: correct them, or set options.topology",
                            options.nodes, options.ranks_per_node));
  }
  return Topology::uniform(options.nodes, options.ranks_per_node);
}

std::shared_ptr<ThreadsWorld> make_world(const Options& options) {
  if (!std::isfinite(options.link_bits_per_s) || options.link_bits_per_s < 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("threads::run: link_bits_per_s = {}; allowed: 0 (as fast as memory) or "
                            "a rate above 0; fix: correct it",
                            options.link_bits_per_s));
  }
  return std::make_shared<ThreadsWorld>(topology_of(options), options.link_bits_per_s);
}

}  // namespace

void run(const Options& options, const std::function<void(Transport&)>& body) {
  const std::shared_ptr<ThreadsWorld> shared = make_world(options);
  ThreadsWorld& world = *shared;
  {
    std::vector<std::jthread> ranks;
    ranks.reserve(world.topology.num_ranks());
    try {
      for (int rank = 0; rank < world.topology.num_ranks(); ++rank) {
        ranks.emplace_back([&shared, &body, rank] { run_rank(shared, rank, body); });
      }
    } catch (const std::system_error& error) {
      const int missing = static_cast<int>(ranks.size());
      const Error refusal(
          ErrorCode::resource_exhausted,
          fmt::format("threads::run: the system gave no thread for rank {} of {} ({}); allowed: as "
                      "many ranks as this process may have threads; fix: use fewer ranks",
                      missing, world.topology.num_ranks(), error.what()));
      world.fail(missing, std::make_exception_ptr(refusal));
    }
  }
  if (world.failure) {
    std::rethrow_exception(world.failure);
  }
}

World::World(const Options& options) : world_(make_world(options)) {}
World::~World() = default;

const Topology& World::topology() const { return world_->topology; }

std::unique_ptr<Transport> World::join(int rank) {
  if (rank < 0 || rank >= world_->topology.num_ranks() || !world_->take(rank)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("threads::World: rank {} is taken, or is none; allowed: 0..{}, once "
                            "each; fix: give every thread a rank of its own",
                            rank, world_->topology.num_ranks() - 1));
  }
  sharpen_sleeps();
  return std::make_unique<ThreadsTransport>(world_, rank);
}

void World::abort(const std::string& text) { world_->abort(text); }

}  // namespace ferry::threads
