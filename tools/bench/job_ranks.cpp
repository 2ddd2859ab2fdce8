// Everything here is a collective of Ferry itself, so it works wherever the exchange does.
#include "bench/job_ranks.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <type_traits>

#include "bench/clock.hpp"
#include "common/failures.hpp"
#include "ferry/exchange.hpp"

namespace ferry::bench {
namespace {

// A rank that got its core late must not make all others wait for long.
constexpr double kLongestNews_s = 2e-3;

/// Equal on two ranks exactly when they share a kernel and its monotonic clock.
std::string clock_name() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  std::array<char, 64> space{};
  const ssize_t length = readlink("/proc/self/ns/time", space.data(), space.size());
  return boot + ' ' + std::string(space.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
}

class Writer {
 public:
  template <typename Value>
  void put(const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    const auto bytes = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  template <typename Value>
  void put_list(const std::vector<Value>& values) {
    put(std::uint64_t{values.size()});
    for (const Value& value : values) put(value);
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename Value>
  void get(Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    if (bytes_.size() < sizeof(Value)) refuse();
    std::memcpy(&value, bytes_.data(), sizeof(Value));
    bytes_ = bytes_.subspan(sizeof(Value));
  }
  template <typename Value>
  void get_list(std::vector<Value>& values) {
    std::uint64_t size = 0;
    get(size);
    if (size > bytes_.size() / sizeof(Value)) refuse();
    values.resize(size);
    for (Value& value : values) get(value);
  }
  void end() const {
    if (!bytes_.empty()) refuse();
  }

 private:
  [[noreturn]] static void refuse() {
    throw tools::EnvironmentError(
        "a rank sent records of another form; fix: start the same build of ferry on all machines");
  }
  std::span<const std::byte> bytes_;
};

}  // namespace

Neighbours find_neighbours(Transport& transport) {
  const std::string own = clock_name();
  const auto names = all_gather(transport, std::as_bytes(std::span(own)));
  Neighbours found;
  for (std::size_t rank = 0; rank < names.size(); ++rank) {
    if (std::ranges::equal(names[rank], std::as_bytes(std::span(own)))) {
      found.ranks_here.push_back(static_cast<int>(rank));
    }
  }
  found.one_clock = found.ranks_here.size() == names.size();
  return found;
}

void JobLine::arrive_and_wait() {
  struct Arrival {
    double at_s = 0;
    double news_took_s = 0;
  };
  const Arrival mine{now_s(), news_took_s_};
  const auto all = all_gather(transport_, std::as_bytes(std::span(&mine, 1)));
  if (!one_clock_) return;
  Arrival last;
  for (const std::vector<std::byte>& bytes : all) {
    Arrival arrival;
    Reader(bytes).get(arrival);
    last.at_s = std::max(last.at_s, arrival.at_s);
    last.news_took_s = std::max(last.news_took_s, arrival.news_took_s);
  }
  news_took_s_ = std::clamp(now_s() - last.at_s, 0.0, kLongestNews_s);
  while (now_s() < last.at_s + last.news_took_s) std::this_thread::yield();
}

std::vector<std::byte> to_bytes(const RankRecords& records) {
  Writer writer;
  writer.put(std::uint64_t{records.strategies.size()});
  for (const RankRecord& record : records.strategies) {
    writer.put_list(record.repeats);
    writer.put(record.counted);
    writer.put(record.summary);
    writer.put(record.memory);
    writer.put(record.metadata_rounds);
    writer.put(record.indices);
    writer.put(record.step);
    writer.put(record.step_no_reuse);
  }
  writer.put(std::uint64_t{records.baselines.size()});
  for (const BaselineRecord& record : records.baselines) {
    writer.put_list(record.repeats);
    writer.put(record.buffer_bytes);
  }
  return writer.take();
}

RankRecords from_bytes(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  RankRecords records;
  std::uint64_t size = 0;
  reader.get(size);
  // Lists of lists grow as they are read, so that a wrong size ends at the end of the bytes.
  for (std::uint64_t i = 0; i < size; ++i) {
    RankRecord& record = records.strategies.emplace_back();
    reader.get_list(record.repeats);
    reader.get(record.counted);
    reader.get(record.summary);
    reader.get(record.memory);
    reader.get(record.metadata_rounds);
    reader.get(record.indices);
    reader.get(record.step);
    reader.get(record.step_no_reuse);
  }
  reader.get(size);
  for (std::uint64_t i = 0; i < size; ++i) {
    BaselineRecord& record = records.baselines.emplace_back();
    reader.get_list(record.repeats);
    reader.get(record.buffer_bytes);
  }
  reader.end();
  return records;
}

}  // namespace ferry::bench
