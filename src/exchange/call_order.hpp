#pragma once
// Finds ranks that make their calls in different orders: calls at one place are the same call.
// Remembers the last places only: what it forgets is caught by the deadline instead.

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

  /// Takes note of a call of any rank. Returns what is known at its place if that is another call.
  const Entry* note(const wire::CallId& call, int rank) {
    if (call.after_failure) return nullptr;
    Entry& entry = entry_of(call.place);
    if (entry.rank < 0 || entry.call.place < call.place) entry = {call, rank};
    return entry.call.place != call.place || wire::same_call(entry.call, call) ? nullptr : &entry;
  }
  /// The call at a place, if it is still remembered.
  const Entry* find(std::uint64_t place) {
    const Entry& entry = entry_of(place);
    return entry.rank >= 0 && entry.call.place == place ? &entry : nullptr;
  }

 private:
  Entry& entry_of(std::uint64_t place) {
    // Places of one plan follow each other; those of the next start elsewhere.
    return entries_[((place >> 32U) * 19 + place) % entries_.size()];
  }
  std::array<Entry, 64> entries_{};
};

}  // namespace ferry::detail
