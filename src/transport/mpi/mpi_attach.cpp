// attach: who shares memory with whom is found by trying (node_links.hpp), then a node of each
// rank follows, and an override may split it.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstring>
#include <exception>
#include <string>
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

void check_state(MPI_Comm comm, const AttachOptions& options) {
  if (!detail::mpi_is_running()) {
    throw Error(ErrorCode::invalid_argument,
                "attach: MPI is not running; fix: call it between MPI_Init and MPI_Finalize");
  }
  if (comm == MPI_COMM_NULL) {
    throw Error(ErrorCode::invalid_argument,
                "attach: the communicator is MPI_COMM_NULL; fix: attach only on ranks that are in "
                "it");
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
  const auto call = std::make_shared<detail::Collective>();
  const auto bytes = std::as_bytes(own);
  call->out.assign(bytes.begin(), bytes.end());
  call->in.resize(bytes.size() * static_cast<std::size_t>(pair.size));
  const int length = static_cast<int>(bytes.size());
  check_mpi(MPI_Iallgather(call->out.data(), length, MPI_BYTE, call->in.data(), length, MPI_BYTE,
                           pair.others, &call->request),
            "MPI_Iallgather");
  detail::wait_for(call, deadline_s, "all ranks in attach");
  std::vector<Value> all(own.size() * static_cast<std::size_t>(pair.size));
  std::memcpy(static_cast<void*>(all.data()), call->in.data(), call->in.size());
  return all;
}

/// Runs one step of the introduction; returns when every rank has. Where it failed on one rank it
/// fails on all, and nobody waits for that rank.
template <typename Step>
void together(const detail::CommPair& pair, double deadline_s, const Step& step) {
  std::exception_ptr failure;
  try {
    step();
  } catch (const Error&) {
    failure = std::current_exception();
  }
  const std::uint8_t own = failure ? 1 : 0;
  const std::vector<std::uint8_t> failed = all_gather(pair, std::span(&own, 1), deadline_s);
  if (failure) std::rethrow_exception(failure);
  const auto first = std::ranges::find(failed, 1);
  if (first == failed.end()) return;
  throw Error(ErrorCode::peer_failed,
              fmt::format("attach: rank {} could not share memory with its node; fix: see its own "
                          "error",
                          first - failed.begin()));
}

/// The node of every rank as the machine has it.
Topology introduce(NodeLinks& links, const detail::CommPair& pair, double deadline_s) {
  const std::vector<NodeCard> cards = all_gather(pair, std::span(&links.card(), 1), deadline_s);
  together(pair, deadline_s, [&] { links.begin(cards); });
  for (int round = 0; round < links.num_rounds(); ++round) {
    together(pair, deadline_s, [&] { links.call(round); });
    together(pair, deadline_s, [&] { links.answer_calls(); });
    together(pair, deadline_s, [&] { links.read_answers(); });
  }
  const std::vector<std::uint8_t> own = links.find_visible();
  const std::vector<std::uint8_t> visible =
      all_gather(pair, std::span<const std::uint8_t>(own), deadline_s);
  return Topology::from_map(detail::nodes_from_visibility(visible, pair.size));
}

/// Names of the machines of all ranks, as errors show them.
std::vector<std::string> gather_hosts(const detail::CommPair& pair, double deadline_s) {
  std::array<char, HOST_NAME_MAX + 1> own{};
  ::gethostname(own.data(), own.size() - 1);  // empty where it fails
  const std::vector<char> all =
      all_gather(pair, std::span<const char>(own.data(), own.size()), deadline_s);
  std::vector<std::string> hosts;
  for (int rank = 0; rank < pair.size; ++rank) {
    hosts.emplace_back(all.data() + static_cast<std::size_t>(rank) * own.size());
  }
  return hosts;
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
  check_state(comm, options);
  const std::shared_ptr<detail::CommPairs> pairs = detail::CommPairs::of(comm);
  const detail::CommPair pair = pairs->take(options.deadline_s);
  try {
    NodeLinks links(pair.rank);
    const Topology found = introduce(links, pair, options.deadline_s);
    const Topology topology = options.topology.value_or(found);
    check_same_everywhere(pair, topology, options.deadline_s);
    check_override(topology, found);
    links.keep(topology.ranks_of(topology.node_of(pair.rank)));
    return std::make_unique<detail::MpiTransport>(pairs, pair, topology, std::move(links),
                                                  gather_hosts(pair, options.deadline_s));
  } catch (const Error& error) {
    // After a timeout a request of the pair is still alive: it is used no more.
    if (error.code() != ErrorCode::timeout) pairs->give_back(pair);
    throw;
  }
}

}  // namespace ferry::mpi
