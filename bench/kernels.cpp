// How fast rows are pushed and summed beside memcpy, in the same run and on the same two cores.
//
// Two ranks (threads) of 1024 tokens, top-8 of 64 experts, rows of 2048 bf16. Rows stand in the
// ranks' windows by expert, then rank, then token, as a dispatch puts them. The reference is
// memcpy, row by row, of as many distinct rows (8192 per rank). Both sides use buffers in rotation
// that are larger than any cache, alternate repeat by repeat, start together with caches that hold
// nothing modified, and end with the last rank. The result is checked before anything is timed.
// `ratio` is memcpy time over ours, the median over repeats.
//
//   bench_kernels                                  all of it
//   bench_kernels --benchmark_filter=push          only pushes
//   bench_kernels --benchmark_filter=wire          wire formats: 2 f16, 3 fp8_e4m3fn, 4 int8

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>
#include <pthread.h>
#include <sys/mman.h>

#include "base/clock.hpp"
#include "base/hash.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::bench {
namespace {

constexpr std::size_t kRanks = 2;
constexpr std::size_t kTokens = 1024;
constexpr std::size_t kTopk = 8;
constexpr std::size_t kExperts = 64;
constexpr std::size_t kHidden = 2048;
constexpr std::size_t kRowBytes = kHidden * 2;
constexpr std::size_t kRows = kTokens * kTopk;
constexpr std::size_t kRotation = 5;
constexpr int kRepeats = 25;

enum class Pages : int { small = 0, huge = 1 };

/// Page-aligned memory on pages of one size, filled with numbers near 1 (bf16).
class Memory {
 public:
  Memory(std::size_t bytes, Pages pages) : mapped_bytes_(bytes + kHugeBytes) {
    mapped_ =
        ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::runtime_error("bench: no memory for the buffers");
    const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
    data_ = reinterpret_cast<std::byte*>((address + kHugeBytes - 1) / kHugeBytes * kHugeBytes);
    ::madvise(data_, bytes, pages == Pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    for (std::size_t i = 0; i < bytes; i += 2) {
      const auto bits = static_cast<std::uint16_t>(0x3F00 | (base::mix64(i) & 0xFF));
      std::memcpy(data_ + i, &bits, 2);
    }
  }
  ~Memory() { ::munmap(mapped_, mapped_bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }

 private:
  static constexpr std::size_t kHugeBytes = std::size_t{2} << 20;
  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
};

/// Row of (token, slot) among all rows of both windows: expert-major, then rank, then token.
std::vector<std::size_t> row_places() {
  std::mt19937_64 random(7);
  std::array<std::vector<std::size_t>, kExperts> of_expert;
  std::array<std::size_t, kExperts> experts{};
  for (std::size_t e = 0; e < kExperts; ++e) experts[e] = e;
  for (std::size_t token = 0; token < kRanks * kTokens; ++token) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (std::size_t slot = 0; slot < kTopk; ++slot) {
      of_expert[experts[slot]].push_back(token * kTopk + slot);
    }
  }
  std::vector<std::size_t> places(kRanks * kRows);
  std::size_t next = 0;
  for (const auto& rows : of_expert) {
    for (const std::size_t row : rows) places[row] = next++;
  }
  return places;
}

/// What one rank needs for one repeat.
struct Buffers {
  Buffers(Pages pages)
      : tokens(kTokens * kRowBytes, pages),
        window(kRows * kRowBytes, pages),
        distinct(kRows * kRowBytes, pages),
        out(kTokens * kRowBytes, pages) {}
  Memory tokens;
  Memory window;
  Memory distinct;  ///< source of the reference; its target is `window`
  Memory out;
  std::vector<kernels::PushRow> push_rows;
  std::vector<std::byte*> push_targets;
  std::vector<kernels::SumRow> sum_rows;
  std::vector<kernels::SumTerm> sum_terms;
};

using Job = std::function<void(Buffers&)>;

class Lab {
 public:
  explicit Lab(Pages pages) {
    for (auto& rank : buffers_) {
      for (std::size_t i = 0; i < kRotation; ++i) rank.push_back(std::make_unique<Buffers>(pages));
    }
    const auto places = row_places();
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      for (std::size_t turn = 0; turn < kRotation; ++turn) connect(rank, turn, places);
    }
  }

  Buffers& at(std::size_t rank, std::size_t turn) { return *buffers_[rank][turn]; }

  /// Runs the jobs in turns on all ranks at once.
  /// Returns [job][repeat] seconds, from the first rank's start to the last rank's end.
  std::vector<std::vector<double>> time_in_turns(const std::vector<Job>& jobs) {
    std::vector<std::vector<double>> times(jobs.size());
    std::barrier together(static_cast<std::ptrdiff_t>(kRanks));
    std::array<double, kRanks> begin{};
    std::array<double, kRanks> end{};
    const auto run = [&](std::size_t rank) {
      stay_on_core(rank);
      std::size_t turn = 0;
      for (int repeat = -1; repeat < kRepeats; ++repeat) {  // the first one warms up
        for (std::size_t job = 0; job < jobs.size(); ++job) {
          turn = (turn + 1) % kRotation;
          clean_caches(rank);
          together.arrive_and_wait();
          begin[rank] = base::now_s();
          jobs[job](at(rank, turn));
          end[rank] = base::now_s();
          together.arrive_and_wait();
          if (rank == 0 && repeat >= 0) {
            times[job].push_back(*std::max_element(end.begin(), end.end()) -
                                 *std::min_element(begin.begin(), begin.end()));
          }
        }
      }
    };
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, rank);
    for (std::thread& thread : threads) thread.join();
    return times;
  }

 private:
  static void stay_on_core(std::size_t rank) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(rank % std::max(1U, std::thread::hardware_concurrency()), &cores);
    ::pthread_setaffinity_np(::pthread_self(), sizeof cores, &cores);
  }

  void connect(std::size_t rank, std::size_t turn, const std::vector<std::size_t>& places) {
    Buffers& own = at(rank, turn);
    for (std::size_t token = 0; token < kTokens; ++token) {
      const auto first = static_cast<std::uint32_t>(token * kTopk);
      own.push_rows.push_back({own.tokens.data() + token * kRowBytes, first, kTopk});
      own.sum_rows.push_back({own.out.data() + token * kRowBytes, first, kTopk});
      for (std::size_t slot = 0; slot < kTopk; ++slot) {
        const std::size_t place = places[rank * kRows + token * kTopk + slot];
        std::byte* row = at(place / kRows, turn).window.data() + place % kRows * kRowBytes;
        own.push_targets.push_back(row);
        const float weight = 0.05F + 0.02F * static_cast<float>(slot);
        const bool last = slot + 1 == kTopk;
        own.sum_terms.push_back({row, weight, WireFormat::bf16, true, last, last});
      }
    }
  }

  /// memcpy leaves megabytes of modified lines in cache; without this the next job would pay for
  /// writing them back.
  void clean_caches(std::size_t rank) {
    const std::byte* data = scrub_[rank].data();
    std::size_t sum = 0;
    for (std::size_t i = 0; i < kScrubBytes; i += 64) sum += std::to_integer<std::size_t>(data[i]);
    benchmark::DoNotOptimize(sum);
  }

  static constexpr std::size_t kScrubBytes = std::size_t{96} << 20;
  std::array<std::vector<std::unique_ptr<Buffers>>, kRanks> buffers_;
  std::array<Memory, kRanks> scrub_{Memory(kScrubBytes, Pages::huge),
                                    Memory(kScrubBytes, Pages::huge)};
};

void copy_distinct(Buffers& own) {
  for (std::size_t row = 0; row < kRows; ++row) {
    std::memcpy(own.window.data() + row * kRowBytes, own.distinct.data() + row * kRowBytes,
                kRowBytes);
  }
}

void push(Buffers& own) {
  kernels::push_rows({DType::bf16, DType::bf16, kHidden, own.push_rows, own.push_targets});
  std::atomic_thread_fence(std::memory_order_seq_cst);  // as raise_flag: streaming stores are done
}

void sum(Buffers& own) {
  kernels::sum_rows({DType::bf16, kHidden, own.sum_rows, own.sum_terms});
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

float bf16_at(const std::byte* row, std::size_t column) {
  std::uint16_t half = 0;
  std::memcpy(&half, row + column * 2, 2);
  return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
}

std::string check_push(Lab& lab) {
  for (std::size_t rank = 0; rank < kRanks; ++rank) push(lab.at(rank, 0));
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    const Buffers& own = lab.at(rank, 0);
    for (std::size_t i = 0; i < kRows; ++i) {
      if (std::memcmp(own.push_targets[i], own.push_rows[i / kTopk].source, kRowBytes) != 0) {
        return "push_rows wrote a wrong row";
      }
    }
  }
  return {};
}

std::string check_sum(Lab& lab) {
  sum(lab.at(0, 0));
  const Buffers& own = lab.at(0, 0);
  for (std::size_t token = 0; token < kTokens; token += 37) {
    for (std::size_t column = 0; column < kHidden; ++column) {
      float expected = 0.0F;
      for (std::size_t i = token * kTopk; i < (token + 1) * kTopk; ++i) {
        expected += own.sum_terms[i].weight * bf16_at(own.sum_terms[i].row, column);
      }
      const auto bits = std::bit_cast<std::uint32_t>(expected);
      const float rounded =
          std::bit_cast<float>((bits + 0x7FFFU + (bits >> 16 & 1U)) & 0xFFFF0000U);
      if (bf16_at(own.sum_rows[token].out, column) != rounded) return "sum_rows made a wrong sum";
    }
  }
  return {};
}

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

/// Times `ours` and memcpy in turns and reports both, and the ratio.
void beside_memcpy(benchmark::State& state, const Job& ours, std::string (*check)(Lab&)) {
  Lab lab(static_cast<Pages>(state.range(0)));
  const std::string fault = check(lab);
  if (!fault.empty()) {
    state.SkipWithError(fault.c_str());
    return;
  }
  const auto times = lab.time_in_turns({copy_distinct, ours});
  for (auto _ : state) state.SetIterationTime(percentile(times[1], 0.5));
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times[0].size(); ++i) ratios.push_back(times[0][i] / times[1][i]);
  state.counters["memcpy_us"] = percentile(times[0], 0.5) * 1e6;
  state.counters["ours_us"] = percentile(times[1], 0.5) * 1e6;
  state.counters["ratio"] = percentile(ratios, 0.5);
  state.counters["ratio_p10"] = percentile(ratios, 0.1);
  state.counters["ratio_p90"] = percentile(ratios, 0.9);
}

void push_beside_memcpy(benchmark::State& state) { beside_memcpy(state, push, check_push); }
void sum_beside_memcpy(benchmark::State& state) { beside_memcpy(state, sum, check_sum); }

void with_both_pages(benchmark::internal::Benchmark* bench) {
  bench->ArgName("huge_pages")->Arg(0)->Arg(1)->UseManualTime()->Iterations(1);
}
BENCHMARK(push_beside_memcpy)->Apply(with_both_pages);
BENCHMARK(sum_beside_memcpy)->Apply(with_both_pages);

/// CPU time of this thread: others on the machine cost it nothing but their share of the memory.
double cpu_s() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

/// Median CPU seconds of two jobs that take turns on one core.
std::array<double, 2> medians_in_turns(const std::array<std::function<void()>, 2>& jobs) {
  std::array<std::vector<double>, 2> times;
  for (int repeat = -1; repeat < kRepeats; ++repeat) {  // the first one warms up
    for (std::size_t job = 0; job < jobs.size(); ++job) {
      const double begin = cpu_s();
      jobs[job]();
      if (repeat >= 0) times[job].push_back(cpu_s() - begin);
    }
  }
  std::array<double, 2> medians{};
  for (std::size_t job = 0; job < jobs.size(); ++job) {
    std::nth_element(times[job].begin(), times[job].begin() + kRepeats / 2, times[job].end());
    medians[job] = times[job][kRepeats / 2];
  }
  return medians;
}

/// Rows of bf16 made into a wire format (or back, to one target) on one core, beside memcpy of the
/// same rows; what is encoded goes to a fragment that is used again, as it does on the way out.
/// What: 0 pack, 1 push from it, 2 pack with a limit of the error that no row misses.
void wire_beside_memcpy(benchmark::State& state) {
  const kernels::RowFormat wire(static_cast<WireFormat>(state.range(0)), kDefaultBlockColumns);
  constexpr std::size_t kFragmentRows = 28;
  const std::size_t wire_bytes = wire.row_bytes(kHidden);
  const Memory source(kRows * kRowBytes, Pages::huge);
  const Memory copy(kRows * kRowBytes, Pages::huge);
  const Memory crossing(kRows * wire_bytes, Pages::huge);
  std::vector<const std::byte*> rows;
  std::vector<kernels::PushRow> crossing_rows;
  std::vector<std::byte*> targets;
  for (std::size_t row = 0; row < kRows; ++row) {
    rows.push_back(source.data() + row * kRowBytes);
    crossing_rows.push_back(
        {crossing.data() + row * wire_bytes, static_cast<std::uint32_t>(row), 1});
    targets.push_back(copy.data() + row * kRowBytes);
  }
  kernels::pack_rows({DType::bf16, wire, kHidden, rows, crossing.data()});
  const auto encode = [&] {
    for (std::size_t row = 0; row < kRows; row += kFragmentRows) {
      const auto fragment = std::span(rows).subspan(row, std::min(kFragmentRows, kRows - row));
      kernels::pack_rows({DType::bf16, wire, kHidden, fragment, crossing.data()});
    }
  };
  const auto decode = [&] {
    kernels::push_rows({wire, DType::bf16, kHidden, crossing_rows, targets});
  };
  const auto encode_within = [&] {
    for (std::size_t row = 0; row < kRows; row += kFragmentRows) {
      const auto fragment = std::span(rows).subspan(row, std::min(kFragmentRows, kRows - row));
      kernels::pack_rows_within({{DType::bf16, wire, kHidden, fragment, crossing.data()},
                                 kernels::RowFormat(WireFormat::bf16, kDefaultBlockColumns),
                                 0.5F});
    }
  };
  const std::function<void()> jobs[] = {encode, decode, encode_within};
  const auto reference = [&] {
    for (std::size_t row = 0; row < kRows; ++row) std::memcpy(targets[row], rows[row], kRowBytes);
    benchmark::ClobberMemory();
  };
  for (auto _ : state) {
    const auto [ours, theirs] = medians_in_turns({jobs[state.range(1)], reference});
    state.SetIterationTime(ours);
    state.counters["ratio"] = theirs / ours;
    state.counters["memcpy_GB/s"] = static_cast<double>(kRows * kRowBytes) / theirs * 1e-9;
  }
}
BENCHMARK(wire_beside_memcpy)
    ->ArgNames({"format", "what"})
    ->ArgsProduct({{2, 3, 4}, {0, 1}})
    ->ArgsProduct({{3, 4}, {2}})
    ->UseManualTime()
    ->Iterations(1);

/// Rows in cache from a dtype to another one or to a wire format, on one core.
void pack(benchmark::State& state) {
  const auto from = static_cast<DType>(state.range(0));
  const kernels::RowFormat to(static_cast<WireFormat>(state.range(1)), kDefaultBlockColumns);
  const std::vector<std::byte> source(kHidden * 4, std::byte{0x3C});
  std::vector<std::byte> out(8 * kHidden * 4);
  const std::vector<const std::byte*> rows(8, source.data());
  for (auto _ : state) {
    kernels::pack_rows({from, to, kHidden, rows, out.data()});
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() *
                          static_cast<std::int64_t>(8 * kHidden * element_bytes(from)));
}
BENCHMARK(pack)->ArgNames({"from", "to"})->ArgsProduct({{0, 1, 2}, {0, 1, 2, 3, 4}});

/// Checksum of a fragment of the usual size.
void crc32c_of_fragment(benchmark::State& state) {
  const std::vector<std::byte> fragment(60 * 1024, std::byte{0x5A});
  for (auto _ : state) benchmark::DoNotOptimize(kernels::crc32c(fragment));
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(fragment.size()));
}
BENCHMARK(crc32c_of_fragment);

}  // namespace
}  // namespace ferry::bench

BENCHMARK_MAIN();
