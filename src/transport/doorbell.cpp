// Sleeping and waking through a futex per rank; see doorbell.hpp.

#include "transport/doorbell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <ctime>

namespace ferry::detail {

Doorbell::Doorbell(int num_ranks)
    : num_ranks_(num_ranks),
      interest_(std::make_unique<std::atomic<std::uint64_t>[]>(num_ranks)),
      words_(std::make_unique<Word[]>(num_ranks)) {}

void Doorbell::arm(int place) {
  words_[place].seen = words_[place].rings.load();
  interest_[place].exchange(kAll);
}

void Doorbell::sleep(int place, std::uint64_t bits, double seconds) {
  Word& word = words_[place];
  std::uint64_t armed = kAll;
  // Fails when somebody rang since arm(): then there may be something to find at once.
  if (!interest_[place].compare_exchange_strong(armed, bits)) {
    return;
  }
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word.rings), FUTEX_WAIT_PRIVATE, word.seen,
            &time, nullptr, 0);
  disarm(place);
}

void Doorbell::wake(int place) {
  // The first ringer of a sleep pays for the call; the others find no interest.
  if (interest_[place].exchange(0) == 0) {
    return;
  }
  words_[place].rings.fetch_add(1);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&words_[place].rings), FUTEX_WAKE_PRIVATE,
            1, nullptr, nullptr, 0);
}

}  // namespace ferry::detail
