// Texts of refusals that transports share; see misuse.hpp.

#include "transport/misuse.hpp"

#include <string>

#include <fmt/format.h>

#include "ferry/error.hpp"

namespace ferry::detail {

namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, text);
}

}  // namespace

void check_owner(const Topology& topology, int asker, int owner, std::uint64_t key) {
  if (owner < 0 || owner >= topology.num_ranks()) {
    refuse(
        fmt::format("map_region: owner {} asked for by rank {} (key {}) is no rank; allowed: "
                    "0..{}; fix: pass a rank of this node",
                    owner, asker, key, topology.num_ranks() - 1));
  }
  if (!topology.same_node(asker, owner)) {
    refuse(
        fmt::format("map_region: rank {} on node {} shares no memory with rank {} on node {} "
                    "(key {}); allowed: owners on the same node; fix: send a message",
                    asker, topology.node_of(asker), owner, topology.node_of(owner), key));
  }
}

void refuse_second_region(int rank, std::uint64_t key) {
  refuse(
      fmt::format("create_region: rank {} already has a region of key {}; allowed: a key that is "
                  "not in use; fix: retire that region first, or use another key",
                  rank, key));
}

void refuse_unknown_region(int rank, std::uint64_t key) {
  refuse(
      fmt::format("retire_region: rank {} has no region of key {}; allowed: keys it created and "
                  "has not retired; fix: retire each region once",
                  rank, key));
}

void check_source(int source, int num_ranks) {
  if (source >= 0 && source < num_ranks) return;
  refuse(
      fmt::format("post_receive: source {} is no rank; allowed: 0..{}; fix: pass a rank of the "
                  "transport's topology",
                  source, num_ranks - 1));
}

void refuse_ticket(int rank, std::uint64_t ticket) {
  refuse(
      fmt::format("sent: rank {} has no send with ticket {}; allowed: tickets of send() that were "
                  "not reported as sent; fix: ask no more after true",
                  rank, ticket));
}

void refuse_unprobed(const Incoming& incoming) {
  refuse(
      fmt::format("accept: message {} from rank {} was not probed here or was accepted before; "
                  "allowed: each probed message once; fix: keep what probe() gave",
                  incoming.id, incoming.source));
}

void check_buffer(const Incoming& incoming, std::uint64_t message_bytes,
                  std::uint64_t buffer_bytes) {
  if (buffer_bytes >= message_bytes) return;
  refuse(
      fmt::format("accept: buffer of {} bytes for a message of {} bytes from rank {}; allowed: at "
                  "least the size that probe() gave; fix: give more memory",
                  buffer_bytes, message_bytes, incoming.source));
}

}  // namespace ferry::detail
