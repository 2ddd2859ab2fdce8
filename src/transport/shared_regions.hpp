#pragma once
// Node memory of ranks that are processes. The owner of a region sends its descriptor to every
// other rank of its node when it makes it; they map it when they look for it. A peer's socket is
// read only when the counter in its hub says that there is something to read.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "transport/node_links.hpp"

namespace ferry::detail {

class SharedRegions {
 public:
  SharedRegions(int rank, NodeLinks links) : rank_(rank), links_(std::move(links)) {}

  /// Errors: invalid_argument when this rank has a region of that key, resource_exhausted.
  std::byte* create(std::uint64_t key, std::uint64_t bytes);
  /// Null while the owner has not created it. Requires: a rank of this node
  std::byte* map(int owner, std::uint64_t key);
  /// Errors: invalid_argument when there is no such region.
  void retire(std::uint64_t key);
  /// Errors: invalid_argument when there is no such region.
  std::shared_ptr<const void> hold(std::uint64_t key) const;
  /// Sends what a full socket held back, and unmaps what others have retired. Never blocks.
  void exchange_notices();

  NodeLinks& links() { return links_; }
  const NodeLinks& links() const { return links_; }

 private:
  enum class Kind : std::uint64_t { created = 1, retired = 2 };
  struct Notice {
    Kind kind = Kind::created;
    std::uint64_t key = 0;
    std::uint64_t bytes = 0;
  };
  struct Outgoing {
    int rank = -1;
    Notice notice;
    std::shared_ptr<UniqueFd> file;  // shared by the notices of one region to several ranks
  };

  void tell_all(const Notice& notice, const std::shared_ptr<UniqueFd>& file);
  void send_held_back();
  void read_notices(NodeLinks::Link& link);

  int rank_;
  NodeLinks links_;
  // Shared with whoever holds a region.
  std::map<std::uint64_t, std::shared_ptr<const Pages>> own_;
  /// A region that a peer has shown; mapped when it is looked for.
  struct Shown {
    UniqueFd file;
    std::uint64_t bytes = 0;
    std::optional<Pages> pages;
  };
  std::map<std::pair<int, std::uint64_t>, Shown> shown_;
  std::map<int, std::uint64_t> num_read_;  // notices, by sender
  std::deque<Outgoing> held_back_;
};

}  // namespace ferry::detail
