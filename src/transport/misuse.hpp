#pragma once
// What every transport refuses in the same words: calls against the rules of ferry/transport.hpp.
// All of them throw invalid_argument.

#include <cstdint>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::detail {

/// map_region: `owner` must be a rank of the asker's node.
void check_owner(const Topology& topology, int asker, int owner, std::uint64_t key);
[[noreturn]] void refuse_second_region(int rank, std::uint64_t key);
[[noreturn]] void refuse_unknown_region(int rank, std::uint64_t key);
/// post_receive: `source` must be a rank.
void check_source(int source, int num_ranks);
/// sent: a ticket that is not, or no longer, known.
[[noreturn]] void refuse_ticket(int rank, std::uint64_t ticket);
/// accept: a message that was not probed, or was accepted before.
[[noreturn]] void refuse_unprobed(const Incoming& incoming);
/// accept: the memory for a message must hold it.
void check_buffer(const Incoming& incoming, std::uint64_t message_bytes,
                  std::uint64_t buffer_bytes);

}  // namespace ferry::detail
