#pragma once
// Which processes share memory with this one, found by trying: a rank shows a page to the ranks
// that could share it, each writes into what it was shown, and two ranks are on one node when both
// find what the other wrote. Names of hosts decide nothing.
//
// The introduction has steps with a meeting of all ranks between them, because the memory that
// would carry a signal is what it is about to find. None of them waits for a peer.

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/regions.hpp"
#include "transport/unique_fd.hpp"

namespace ferry::detail {

/// What a rank tells all others first. Plain bytes: it travels as they are.
struct NodeCard {
  std::array<char, 40> boot_id{};      ///< of the running kernel: only its ranks can share memory
  std::array<char, 32> socket_name{};  ///< where it is called, in the abstract namespace
  std::uint64_t secret = 0;            ///< tells its peers from strangers that call the same socket
};

/// The page of one rank that its node sees.
struct Hub {
  static constexpr std::size_t kTextBytes = 1000;

  /// What another rank writes here, by its number.
  struct alignas(64) Cell {
    std::atomic<std::uint64_t> probe{0};
    std::atomic<std::uint64_t> notices{0};  ///< messages that the hub's owner has sent to that rank
  };
  static std::uint64_t bytes(int num_ranks) {
    return sizeof(Hub) + static_cast<std::uint64_t>(num_ranks) * sizeof(Cell);
  }
  Cell& cell(int rank) { return reinterpret_cast<Cell*>(this + 1)[rank]; }

  alignas(64) std::atomic<std::uint32_t> abort_claimed{0};
  std::atomic<std::uint32_t> abort_told{0};
  std::array<char, kTextBytes> abort_text{};
};

class NodeLinks {
 public:
  /// Another rank of this node.
  struct Link {
    int rank = -1;
    UniqueFd socket;
    std::optional<Pages> hub;
  };

  /// Errors: resource_exhausted
  explicit NodeLinks(int rank);

  const NodeCard& card() const { return card_; }

  // The introduction, all ranks meeting between two calls: begin, then num_rounds() times call,
  // answer_calls, read_answers. Rounds, because a system allows only so many descriptors on their
  // way at a time. Errors of all: resource_exhausted
  void begin(std::span<const NodeCard> cards);  ///< of all ranks
  int num_rounds() const;                       ///< the same on all ranks
  void call(int round);
  void answer_calls();
  void read_answers();
  /// [num_ranks] 1 where that rank wrote into this rank's page, and for itself.
  std::vector<std::uint8_t> find_visible() const;
  /// Ends the introduction: the ranks to stay linked with, ascending, this one among them.
  void keep(std::span<const int> ranks);

  std::vector<Link>& links() { return links_; }
  Link* find(int rank);
  Hub& hub() const { return *reinterpret_cast<Hub*>(hub_->data()); }
  static Hub& hub_of(const Link& link) { return *reinterpret_cast<Hub*>(link.hub->data()); }

  /// The end of the job, told to and by the ranks of this node; the first text of each rank counts.
  void tell_abort(const std::string& text);
  std::optional<std::string> aborted() const;

 private:
  struct Hello;

  void send_hello(int socket) const;
  void take_hello(Link& link);
  std::uint64_t mark_of(int writer, int owner) const;

  /// Ranks whose kernel is `rank`'s, ascending: those that may share memory with it.
  std::vector<int> candidates_of(int rank) const;
  void call_rank(int rank);

  int rank_;
  NodeCard card_;
  UniqueFd listener_;
  UniqueFd hub_file_;
  std::optional<Pages> hub_;
  std::vector<NodeCard> cards_;
  std::vector<Link> links_;  // ascending rank once introduced
};

/// The node of each rank, from who sees whom (row r = find_visible of rank r): a rank joins the
/// first node whose ranks all see it and are seen by it. Numbered by their first ranks.
std::vector<int> nodes_from_visibility(std::span<const std::uint8_t> visible, int num_ranks);

}  // namespace ferry::detail
