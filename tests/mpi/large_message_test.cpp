// One message of each way to receive, longer than an int can count: MPI takes it as blocks of a
// datatype of their own. Run with 2 ranks; needs 6 GB.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <thread>

#include "ferry/ferry.hpp"
#include "ferry/mpi.hpp"

namespace {

constexpr std::size_t kBytes = (5ULL << 29U) + 12345;  // 2.5 GiB, and no multiple of anything
constexpr int kSkipped = 77;

std::byte value_at(std::size_t at) {
  return static_cast<std::byte>(at * 0x9E3779B97F4A7C15ULL >> 56U);
}

std::span<std::byte> reserve() {
  void* const memory =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  ::madvise(memory, kBytes, MADV_HUGEPAGE);  // best effort: faults are most of the time
  return {static_cast<std::byte*>(memory), kBytes};
}

void send_both(ferry::Transport& transport, std::span<std::byte> memory) {
  for (std::size_t at = 0; at < memory.size(); ++at) memory[at] = value_at(at);
  for (const auto kind : {ferry::MessageKind::payload, ferry::MessageKind::metadata}) {
    const std::uint64_t ticket = transport.send(1, kind, memory);
    while (!transport.sent(ticket)) std::this_thread::yield();
  }
}

bool is_right(const ferry::Received& received, std::span<std::byte> memory) {
  if (received.bytes != kBytes || received.truncated) return false;
  for (std::size_t at = 0; at < memory.size(); ++at) {
    if (memory[at] != value_at(at)) return false;
  }
  std::memset(memory.data(), 0, memory.size());
  return true;
}

bool receive_both(ferry::Transport& transport, std::span<std::byte> memory) {
  transport.post_receive(0, memory);
  for (int received = 0; received < 2;) {
    if (const auto incoming = transport.probe()) transport.accept(*incoming, memory);
    const auto arrived = transport.poll_received();
    if (!arrived) continue;
    ++received;
    if (!is_right(*arrived, memory)) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (::sysconf(_SC_AVPHYS_PAGES) * ::sysconf(_SC_PAGESIZE) < (6LL << 30)) return kSkipped;
  MPI_Init(&argc, &argv);
  bool right = true;
  {
    const auto transport =
        ferry::mpi::attach(MPI_COMM_WORLD, {.topology = ferry::Topology::uniform(2, 1)});
    const std::span<std::byte> memory = reserve();
    if (transport->rank() == 0) {
      send_both(*transport, memory);
    } else {
      right = receive_both(*transport, memory);
      std::printf("large_message_test: %s\n", right ? "both messages are right" : "a wrong byte");
    }
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
