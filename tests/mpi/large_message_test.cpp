// One message of each way to receive, longer than an int can count: MPI takes it as blocks of a
// datatype of their own. Run with 2 ranks; needs 2.5 GB.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"
#include "ferry/mpi.hpp"

namespace {

constexpr std::size_t kBytes = (1ULL << 31U) + 12345;  // no multiple of anything
// What is sent repeats itself: the sender maps the same pages again and again, since the first
// touch of pages takes most of the time. No power of two: blocks at wrong places must look wrong.
constexpr std::size_t kPeriod = 4099UL * 4096;
constexpr std::size_t kPeriods = (kBytes + kPeriod - 1) / kPeriod;
constexpr int kSkipped = 77;

std::vector<std::byte> make_pattern() {
  std::vector<std::byte> pattern(kPeriod);
  for (std::size_t at = 0; at < kPeriod; ++at) {
    pattern[at] = static_cast<std::byte>(at * 0x9E3779B97F4A7C15ULL >> 56U);
  }
  return pattern;
}

std::byte* reserve() {
  void* const memory = ::mmap(nullptr, kPeriods * kPeriod, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<std::byte*>(memory);
}

/// kBytes of the pattern over and over.
std::span<const std::byte> map_message(std::span<const std::byte> pattern) {
  const int file = ::memfd_create("large_message", MFD_CLOEXEC);
  std::byte* const memory = reserve();
  if (::write(file, pattern.data(), kPeriod) != static_cast<ssize_t>(kPeriod)) std::abort();
  for (std::size_t i = 0; i < kPeriods; ++i) {
    if (::mmap(memory + i * kPeriod, kPeriod, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) ==
        MAP_FAILED) {
      std::abort();
    }
  }
  return {memory, kBytes};
}

void send_both(ferry::Transport& transport) {
  const std::span<const std::byte> message = map_message(make_pattern());
  for (const auto kind : {ferry::MessageKind::payload, ferry::MessageKind::metadata}) {
    const std::uint64_t ticket = transport.send(1, kind, message);
    while (!transport.sent(ticket)) std::this_thread::yield();
  }
}

bool is_right(const ferry::Received& received, std::span<const std::byte> memory,
              std::span<const std::byte> pattern) {
  if (received.bytes != kBytes || received.truncated) return false;
  for (std::size_t at = 0; at < kBytes; at += kPeriod) {
    if (std::memcmp(&memory[at], pattern.data(), std::min(kPeriod, kBytes - at)) != 0) return false;
  }
  return true;
}

bool receive_both(ferry::Transport& transport) {
  const std::vector<std::byte> pattern = make_pattern();
  const std::span<std::byte> memory(reserve(), kBytes);
  ::madvise(memory.data(), kBytes, MADV_HUGEPAGE);  // best effort
  transport.post_receive(0, memory);
  for (int received = 0; received < 2;) {
    if (const auto incoming = transport.probe()) transport.accept(*incoming, memory);
    const auto arrived = transport.poll_received();
    if (!arrived) continue;
    ++received;
    if (!is_right(*arrived, memory, pattern)) return false;
    std::memset(memory.data(), 0, kBytes);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (::sysconf(_SC_AVPHYS_PAGES) * ::sysconf(_SC_PAGESIZE) < (5LL << 29)) return kSkipped;
  MPI_Init(&argc, &argv);
  bool right = true;
  {
    const auto transport =
        ferry::mpi::attach(MPI_COMM_WORLD, {.topology = ferry::Topology::uniform(2, 1)});
    if (transport->rank() == 0) {
      send_both(*transport);
    } else {
      right = receive_both(*transport);
      std::printf("large_message_test: %s\n", right ? "both messages are right" : "a wrong byte");
    }
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
