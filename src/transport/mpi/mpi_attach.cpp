// attach: who shares memory with whom is found by trying (node_links.hpp), then a node of each
// rank follows, and an override may split it.

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "ferry/error.hpp"
#include "ferry/mpi.hpp"
#include "transport/mpi/mpi_comm.hpp"
#include "transport/mpi/mpi_transport.hpp"
#include "transport/node_links.hpp"

namespace ferry::mpi {

namespace {

using detail::check_mpi;
using detail::NodeCard;
using detail::NodeLinks;

void check_state(const AttachOptions& options) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0 || detail::mpi_has_ended()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("attach: MPI is not running; fix: call it between MPI_Init and "
                            "MPI_Finalize"));
  }
  if (!std::isfinite(options.deadline_s) || options.deadline_s <= 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("attach: deadline_s = {}; allowed: above 0; fix: correct it",
                            options.deadline_s));
  }
  int level = MPI_THREAD_SINGLE;
  int is_main = 0;
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&is_main);
  if (level < MPI_THREAD_SERIALIZED && is_main == 0) {
    throw Error(ErrorCode::unsupported,
                "attach: called on another thread than the one that initialised MPI, which "
                "provides no more than MPI_THREAD_FUNNELED; fix: ask MPI_Init_thread for "
                "MPI_THREAD_SERIALIZED or more, or attach on the main thread");
  }
}

/// The same number of values from every rank, by rank.
template <typename Value>
std::vector<Value> all_gather(const detail::CommPair& pair, std::span<const Value> own,
                              double deadline_s) {
  std::vector<Value> all(own.size() * static_cast<std::size_t>(pair.size));
  const int bytes = static_cast<int>(own.size_bytes());
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Iallgather(own.data(), bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, pair.others,
                           &request),
            "MPI_Iallgather");
  detail::wait_for_request(request, deadline_s, "all ranks in attach");
  return all;
}

void meet(const detail::CommPair& pair, double deadline_s) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(pair.others, &request), "MPI_Ibarrier");
  detail::wait_for_request(request, deadline_s, "all ranks in attach");
}

/// The node of every rank as the machine has it.
Topology introduce(NodeLinks& links, const detail::CommPair& pair, double deadline_s) {
  const std::vector<NodeCard> cards = all_gather(pair, std::span(&links.card(), 1), deadline_s);
  links.call_lower_ranks(cards);
  meet(pair, deadline_s);
  links.answer_calls();
  meet(pair, deadline_s);
  links.read_answers();
  meet(pair, deadline_s);
  const std::vector<std::uint8_t> own = links.find_visible();
  const std::vector<std::uint8_t> visible =
      all_gather(pair, std::span<const std::uint8_t>(own), deadline_s);
  return Topology::from_map(detail::nodes_from_visibility(visible, pair.size));
}

/// What is wrong with an override; the same on every rank that was given the same.
void check_override(const Topology& wanted, const Topology& found) {
  if (wanted.num_ranks() != found.num_ranks()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("attach: the topology {} has {} ranks, the communicator {}; fix: make "
                            "them equal",
                            wanted.describe(), wanted.num_ranks(), found.num_ranks()));
  }
  for (int node = 0; node < wanted.num_nodes(); ++node) {
    const int first = wanted.ranks_of(node).front();
    for (const int rank : wanted.ranks_of(node)) {
      if (found.same_node(first, rank)) continue;
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("attach: the topology {} puts ranks {} and {} on one node, but they "
                              "share no memory: the machines are {}; allowed: to split machines "
                              "into more nodes; fix: correct the topology or the placement of "
                              "ranks by the launcher",
                              wanted.describe(), first, rank, found.describe()));
    }
  }
}

/// Ranks that were given different overrides would wait for each other for ever.
void check_same_everywhere(const detail::CommPair& pair, const Topology& topology,
                           double deadline_s) {
  const std::uint64_t own = topology.hash();
  const std::vector<std::uint64_t> all = all_gather(pair, std::span(&own, 1), deadline_s);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw Error(ErrorCode::mismatch,
                fmt::format("attach: rank {} was given another topology than rank 0; fix: pass the "
                            "same options on all ranks",
                            rank));
  }
}

}  // namespace

std::unique_ptr<Transport> attach(MPI_Comm comm, const AttachOptions& options) {
  check_state(options);
  detail::CommPairs& pairs = detail::CommPairs::of(comm);
  const detail::CommPair pair = pairs.take(options.deadline_s);
  try {
    NodeLinks links(pair.rank);
    const Topology found = introduce(links, pair, options.deadline_s);
    const Topology topology = options.topology.value_or(found);
    check_same_everywhere(pair, topology, options.deadline_s);
    check_override(topology, found);
    links.keep(topology.ranks_of(topology.node_of(pair.rank)));
    return std::make_unique<detail::MpiTransport>(pairs, pair, topology, std::move(links));
  } catch (const Error& error) {
    // After a timeout a request of the pair is still alive: it is used no more.
    if (error.code() != ErrorCode::timeout) pairs.give_back(pair);
    throw;
  }
}

}  // namespace ferry::mpi
