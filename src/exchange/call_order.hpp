#pragma once
// Finds ranks that make their calls in different orders: calls at one place are the same call.
// Remembers the last places only: what it forgets is caught by the deadline instead. Calls of other
// ranks, which may be far ahead, do not displace this rank's own.

#include <array>
#include <cstdint>

#include "wire/headers.hpp"

namespace ferry::detail {

class CallOrder {
 public:
  struct Entry {
    wire::CallId call;
    int rank = -1;
  };

  /// Takes note of a call of this rank. Returns what another one made at its place, if that is a
  /// different call.
  const Entry* note_own(const wire::CallId& call, int rank) {
    if (call.after_failure) return nullptr;
    own_[index_of(call.place)] = {call, rank};
    return conflict(foreign_[index_of(call.place)], call);
  }
  /// The same for a call of another rank.
  const Entry* note_foreign(const wire::CallId& call, int rank) {
    if (call.after_failure) return nullptr;
    if (const Entry* const other = conflict(own_[index_of(call.place)], call)) return other;
    Entry& known = foreign_[index_of(call.place)];
    if (known.rank < 0 || known.call.place < call.place) known = {call, rank};
    return conflict(known, call);
  }
  /// This rank's call at a place, if it is still remembered.
  const wire::CallId* find_own(std::uint64_t place) const {
    const Entry& entry = own_[index_of(place)];
    return entry.rank >= 0 && entry.call.place == place ? &entry.call : nullptr;
  }

 private:
  using Entries = std::array<Entry, 64>;

  // Places of one plan follow each other; those of the next start elsewhere.
  static std::size_t index_of(std::uint64_t place) {
    return ((place >> 32U) * 19 + place) % std::tuple_size_v<Entries>;
  }
  static const Entry* conflict(const Entry& known, const wire::CallId& call) {
    const bool same_place = known.rank >= 0 && known.call.place == call.place;
    return same_place && !wire::same_call(known.call, call) ? &known : nullptr;
  }

  Entries own_{};
  Entries foreign_{};
};

}  // namespace ferry::detail
