// The introduction of ranks that may share memory; see node_links.hpp.

#include "transport/node_links.hpp"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <map>
#include <new>

#include <fmt/format.h>

#include "base/hash.hpp"
#include "ferry/error.hpp"
#include "transport/shared_file.hpp"

namespace ferry::detail {

/// First message of a link, with the descriptor of the sender's hub.
struct NodeLinks::Hello {
  std::int32_t rank = -1;
  std::uint64_t secret = 0;
};

namespace {

// Not for tests to repeat: strangers must not guess it.
std::uint64_t draw_secret() {
  std::uint64_t secret = 0;
  if (::getrandom(&secret, sizeof secret, 0) != static_cast<ssize_t>(sizeof secret)) {
    throw Error(ErrorCode::resource_exhausted,
                fmt::format("attach: the system gave no random number ({})", std::strerror(errno)));
  }
  return secret;
}

sockaddr_un address_of(const NodeCard& card, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::size_t name = ::strnlen(card.socket_name.data(), card.socket_name.size());
  std::memcpy(address.sun_path + 1, card.socket_name.data(), name);  // [0] = 0: abstract
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name);
  return address;
}

UniqueFd make_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) {
    throw Error(ErrorCode::resource_exhausted,
                fmt::format("attach: the system gave no socket for the ranks of this node ({}); "
                            "fix: raise the limit of open files",
                            std::strerror(errno)));
  }
  return socket;
}

// Descriptors on their way count against the limit of open files of their sender's user, commonly
// 1024: that of all ranks of a machine stays well below.
int calls_per_round(int num_candidates) { return std::max(1, 256 / num_candidates); }

bool is_same_user(int socket) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

}  // namespace

NodeLinks::NodeLinks(int rank) : rank_(rank), listener_(make_socket()) {
  std::ifstream("/proc/sys/kernel/random/boot_id")
      .getline(card_.boot_id.data(), static_cast<std::streamsize>(card_.boot_id.size()));
  card_.secret = draw_secret();
  const std::string name = fmt::format("ferry-{:016x}", draw_secret());
  std::copy(name.begin(), name.end(), card_.socket_name.begin());
  socklen_t length = 0;
  const sockaddr_un address = address_of(card_, length);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0) {
    throw Error(ErrorCode::resource_exhausted,
                fmt::format("attach: the system gave no name for a unix socket ({}); fix: see the "
                            "limits of this process",
                            std::strerror(errno)));
  }
}

void NodeLinks::send_hello(int socket) const {
  const Hello hello{.rank = rank_, .secret = card_.secret};
  const SendOutcome outcome =
      send_with_file(socket, std::as_bytes(std::span(&hello, 1)), hub_file_.get());
  if (outcome != SendOutcome::full) return;  // where the other is gone it is on no node at all
  throw Error(ErrorCode::resource_exhausted,
              fmt::format("attach: rank {} may send no more descriptors to the ranks of its node; "
                          "fix: raise the limit of open files (ulimit -n)",
                          rank_));
}

// Closes a link whose other end is no rank of this job.
void NodeLinks::take_hello(Link& link) {
  Hello hello;
  auto received =
      receive_with_file(link.socket.get(), std::as_writable_bytes(std::span(&hello, 1)));
  const std::uint64_t bytes = Hub::bytes(static_cast<int>(cards_.size()));
  const bool known = received && received->bytes == sizeof hello && hello.rank >= 0 &&
                     hello.rank < static_cast<int>(cards_.size()) && hello.rank != rank_ &&
                     cards_[hello.rank].secret == hello.secret &&
                     is_safe_to_map(received->file.get(), bytes);
  if (!known || !is_same_user(link.socket.get())) {
    link.socket.reset();
    return;
  }
  link.rank = hello.rank;
  link.hub.emplace(received->file.get(), bytes);
  hub_of(link).cell(rank_).probe.store(mark_of(rank_, link.rank));
}

std::uint64_t NodeLinks::mark_of(int writer, int owner) const {
  return base::mix64(cards_[writer].secret) ^ cards_[owner].secret;
}

void NodeLinks::begin(std::span<const NodeCard> cards) {
  cards_.assign(cards.begin(), cards.end());
  const std::uint64_t bytes = Hub::bytes(static_cast<int>(cards.size()));
  hub_file_ = make_shared_file(bytes);
  hub_.emplace(hub_file_.get(), bytes);
  new (hub_->data()) Hub;
  for (int rank = 0; rank < static_cast<int>(cards.size()); ++rank) {
    new (&hub().cell(rank)) Hub::Cell;
  }
}

std::vector<int> NodeLinks::candidates_of(int rank) const {
  std::vector<int> candidates;
  for (int other = 0; other < static_cast<int>(cards_.size()); ++other) {
    if (cards_[other].boot_id == cards_[rank].boot_id) candidates.push_back(other);
  }
  return candidates;
}

int NodeLinks::num_rounds() const {
  std::map<decltype(NodeCard::boot_id), int> sizes;
  int largest = 0;
  for (const NodeCard& card : cards_) largest = std::max(largest, ++sizes[card.boot_id]);
  return largest < 2 ? 0 : (largest - 2) / calls_per_round(largest) + 1;
}

// A rank calls those below it, the nearest first.
void NodeLinks::call(int round) {
  const std::vector<int> candidates = candidates_of(rank_);
  const auto own = std::ranges::find(candidates, rank_) - candidates.begin();
  const int per_round = calls_per_round(static_cast<int>(candidates.size()));
  for (std::ptrdiff_t i = 1; i <= per_round; ++i) {
    const std::ptrdiff_t at = own - std::ptrdiff_t{round} * per_round - i;
    if (at >= 0) call_rank(candidates[static_cast<std::size_t>(at)]);
  }
}

void NodeLinks::call_rank(int rank) {
  Link link{.rank = rank, .socket = make_socket(), .hub = {}};
  socklen_t length = 0;
  const sockaddr_un address = address_of(cards_[rank], length);
  if (::connect(link.socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    // Refused at once where the other is in a network of its own: then it is on another node.
    if (errno == ECONNREFUSED) return;
    throw Error(ErrorCode::resource_exhausted,
                fmt::format("attach: rank {} cannot call rank {} on its machine ({}); fix: see the "
                            "limits of this system (net.core.somaxconn)",
                            rank_, rank, std::strerror(errno)));
  }
  send_hello(link.socket.get());
  links_.push_back(std::move(link));
}

void NodeLinks::answer_calls() {
  while (true) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      break;
    }
    Link link{.rank = -1, .socket = std::move(socket), .hub = {}};
    take_hello(link);
    if (!link.hub) continue;
    send_hello(link.socket.get());
    links_.push_back(std::move(link));
  }
}

void NodeLinks::read_answers() {
  for (Link& link : links_) {
    if (!link.hub) take_hello(link);
  }
  std::erase_if(links_, [](const Link& link) { return !link.hub; });
}

std::vector<std::uint8_t> NodeLinks::find_visible() const {
  std::vector<std::uint8_t> visible(cards_.size());
  visible[rank_] = 1;
  for (const Link& link : links_) {
    const std::uint64_t found = hub().cell(link.rank).probe.load();
    visible[link.rank] = found == mark_of(link.rank, rank_) ? 1 : 0;
  }
  return visible;
}

void NodeLinks::keep(std::span<const int> ranks) {
  listener_.reset();
  hub_file_.reset();
  std::ranges::sort(links_, {}, &Link::rank);
  std::erase_if(links_,
                [&](const Link& link) { return !std::ranges::binary_search(ranks, link.rank); });
}

NodeLinks::Link* NodeLinks::find(int rank) {
  const auto found = std::ranges::lower_bound(links_, rank, {}, &Link::rank);
  return found != links_.end() && found->rank == rank ? &*found : nullptr;
}

void NodeLinks::tell_abort(const std::string& text) {
  Hub& own = hub();
  if (own.abort_claimed.exchange(1) != 0) return;
  const std::size_t length = std::min(text.size(), Hub::kTextBytes - 1);
  std::copy_n(text.begin(), length, own.abort_text.begin());
  own.abort_told.store(1, std::memory_order_release);
}

std::optional<std::string> NodeLinks::aborted() const {
  const auto text_of = [](Hub& hub) -> std::optional<std::string> {
    if (hub.abort_told.load(std::memory_order_acquire) == 0) return std::nullopt;
    return std::string(hub.abort_text.data(), ::strnlen(hub.abort_text.data(), Hub::kTextBytes));
  };
  if (auto text = text_of(hub())) return text;
  for (const Link& link : links_) {
    if (auto text = text_of(hub_of(link))) return text;
  }
  return std::nullopt;
}

std::vector<int> nodes_from_visibility(std::span<const std::uint8_t> visible, int num_ranks) {
  const auto sees = [&](int a, int b) {
    return visible[static_cast<std::size_t>(a) * static_cast<std::size_t>(num_ranks) +
                   static_cast<std::size_t>(b)] != 0;
  };
  std::vector<std::vector<int>> nodes;
  std::vector<int> node_of(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto joined = std::ranges::find_if(nodes, [&](const std::vector<int>& members) {
      return std::ranges::all_of(members,
                                 [&](int other) { return sees(rank, other) && sees(other, rank); });
    });
    node_of[static_cast<std::size_t>(rank)] = static_cast<int>(joined - nodes.begin());
    if (joined == nodes.end()) {
      nodes.push_back({rank});
    } else {
      joined->push_back(rank);
    }
  }
  return node_of;
}

}  // namespace ferry::detail
