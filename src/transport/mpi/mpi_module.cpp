// MPI for programs that do not link it; see mpi_module.hpp.

#include "transport/mpi/mpi_module.hpp"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <map>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/clock.hpp"
#include "ferry/error.hpp"
#include "ferry/mpi.hpp"
#include "transport/mpi/mpi_comm.hpp"
#include "transport/mpi/mpi_end.hpp"
#include "transport/mpi/mpi_transport.hpp"

namespace ferry::detail {

namespace {

constexpr double kAbortLimit_s = 5;

/// One side of MPI_Alltoallv as MPI takes it.
struct IntParts {
  std::vector<int> counts;
  std::vector<int> offsets;
};

/// Highest unit that a side reaches, plus one.
std::int64_t end_of(const RankParts& parts) {
  std::int64_t end = 0;
  for (std::size_t rank = 0; rank < parts.counts.size(); ++rank) {
    end = std::max(end, parts.offsets[rank] + parts.counts[rank]);
  }
  return end;
}

IntParts to_int(const RankParts& parts, std::int64_t factor) {
  IntParts result;
  for (std::size_t rank = 0; rank < parts.counts.size(); ++rank) {
    result.counts.push_back(static_cast<int>(parts.counts[rank] * factor));
    result.offsets.push_back(static_cast<int>(parts.offsets[rank] * factor));
  }
  return result;
}

void check_parts(const RankParts& parts, std::uint64_t unit_bytes, int size) {
  const auto ranks = static_cast<std::size_t>(size);
  if (parts.unit_bytes == unit_bytes && unit_bytes > 0 && parts.counts.size() == ranks &&
      parts.offsets.size() == ranks) {
    return;
  }
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("alltoallv: {} counts and {} offsets of {} bytes; allowed: {} of each, in "
                  "one unit above 0 on both sides; fix: correct them",
                  parts.counts.size(), parts.offsets.size(), parts.unit_bytes, size));
}

/// The units of an all-to-all as a datatype: bytes, unless offsets in bytes would not fit an int.
class UnitType {
 public:
  UnitType(std::uint64_t unit_bytes, std::int64_t end) : factor_(1) {
    constexpr std::int64_t kMost = std::numeric_limits<int>::max();
    const auto unit = static_cast<std::int64_t>(unit_bytes);
    if (unit <= kMost && end <= kMost / unit) {
      factor_ = unit;
      return;
    }
    if (end > kMost || unit > kMost) {
      throw Error(
          ErrorCode::unsupported,
          fmt::format("alltoallv: {} units of {} bytes; allowed: fewer than 2^31 units, each "
                      "below 2 GiB, because MPI counts with an int; fix: send fewer rows",
                      end, unit_bytes));
    }
    check_mpi(MPI_Type_contiguous(static_cast<int>(unit), MPI_BYTE, &type_), "MPI_Type_contiguous");
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  UnitType(const UnitType&) = delete;
  UnitType& operator=(const UnitType&) = delete;
  ~UnitType() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  MPI_Datatype type() const { return type_; }
  /// Elements of the type in one unit.
  std::int64_t factor() const { return factor_; }

 private:
  MPI_Datatype type_ = MPI_BYTE;
  std::int64_t factor_;
};

/// "MPICH Version:\t4.0.2" and the like without the word and the tab.
std::string tidy_version(std::string text) {
  constexpr std::string_view kWord = " Version:";
  if (const auto at = text.find(kWord); at != std::string::npos) text.erase(at, kWord.size());
  std::string tidy;
  for (const char letter : text) {
    const bool blank = letter == ' ' || letter == '\t';
    if (!blank) {
      tidy += letter;
    } else if (!tidy.empty() && tidy.back() != ' ') {
      tidy += ' ';
    }
  }
  return tidy;
}

class Job final : public MpiJob {
 public:
  explicit Job(const MpiJobOptions& options) : options_(options) {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) {
      throw Error(ErrorCode::unsupported,
                  "MPI has ended in this process, and cannot begin again; fix: do all work of a "
                  "process in one launch::run, or initialise MPI in the program");
    }
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized == 0) {
      int provided = MPI_THREAD_SINGLE;
      const int wanted = options.many_threads ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED;
      check_mpi(MPI_Init_thread(nullptr, nullptr, wanted, &provided), "MPI_Init_thread");
      owns_mpi_ = true;
      // Errors of requests go to these, whatever the communicator; MPI would end the job.
      for (const MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF}) {
        check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
      }
      if (provided < wanted) {
        throw Error(ErrorCode::unsupported,
                    "MPI_Init_thread gave a lower thread level than was asked for; fix: use an MPI "
                    "that is built with threads, or progress by the caller");
      }
    }
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  }

  ~Job() override {
    if (!mpi_is_running()) return;
    // Freeing is collective, like the end of MPI: not where ranks are missing.
    if (own_comm_ != MPI_COMM_NULL && !left_) MPI_Comm_free(&own_comm_);
    if (owns_mpi_ && !left_) MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::string mpi() const override {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    const std::string whole(text.data(), static_cast<std::size_t>(length));
    return tidy_version(whole.substr(0, whole.find_first_of(",\n")));
  }

  std::unique_ptr<Transport> attach(int num_ranks, const Topology* topology) override {
    const MPI_Comm comm = first_ranks(num_ranks);
    if (comm == MPI_COMM_NULL) return nullptr;
    return attach_to(&comm, topology);
  }

  std::unique_ptr<Transport> attach_to(const void* comm, const Topology* topology) override {
    mpi::AttachOptions options{.topology = {}, .deadline_s = options_.deadline_s};
    if (topology != nullptr) options.topology = *topology;
    return mpi::attach(*static_cast<const MPI_Comm*>(comm), options);
  }

  void alltoall(std::span<const std::int64_t> send, std::span<std::int64_t> receive) override {
    const auto ranks = static_cast<std::size_t>(size_);
    if (send.size() != receive.size() || send.size() % ranks != 0) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("alltoall: {} values out, {} in; allowed: the same multiple of {}; fix: "
                      "give every rank a part of one size",
                      send.size(), receive.size(), size_));
    }
    const int count = static_cast<int>(send.size() / ranks);
    check_mpi(MPI_Alltoall(send.data(), count, MPI_INT64_T, receive.data(), count, MPI_INT64_T,
                           own_comm()),
              "MPI_Alltoall");
  }

  void alltoallv(const RankParts& send, const RankParts& receive) override {
    check_parts(send, send.unit_bytes, size_);
    check_parts(receive, send.unit_bytes, size_);
    // The types may differ between ranks, their signatures do not: all are bytes.
    const UnitType out(send.unit_bytes, end_of(send));
    const UnitType in(receive.unit_bytes, end_of(receive));
    const IntParts to = to_int(send, out.factor());
    const IntParts from = to_int(receive, in.factor());
    check_mpi(
        MPI_Alltoallv(send.data, to.counts.data(), to.offsets.data(), out.type(), receive.data,
                      from.counts.data(), from.offsets.data(), in.type(), own_comm()),
        "MPI_Alltoallv");
  }

  void swap_and_meet(std::span<const Swap> swaps, std::span<const int> ranks) override {
    const MPI_Comm group = comm_of(ranks);
    requests_.assign(2 * swaps.size(), MPI_REQUEST_NULL);
    std::size_t next = 0;
    for (const Swap& swap : swaps) {
      const MpiBytes length(swap.receive.size());
      check_mpi(MPI_Irecv(swap.receive.data(), length.count(), length.type(), swap.peer, 0,
                          own_comm(), &requests_[next++]),
                "MPI_Irecv");
    }
    for (const Swap& swap : swaps) {
      const MpiBytes length(swap.send.size());
      check_mpi(MPI_Isend(swap.send.data(), length.count(), length.type(), swap.peer, 0, own_comm(),
                          &requests_[next++]),
                "MPI_Isend");
    }
    check_mpi(
        MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE),
        "MPI_Waitall");
    check_mpi(MPI_Barrier(group), "MPI_Barrier");
  }

  bool meet(double limit_s, Transport* transport) override {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &request), "MPI_Ibarrier");
    double end_s = base::now_s() + limit_s;
    bool aborted = false;
    while (true) {
      int here = 0;
      check_mpi(MPI_Test(&request, &here, MPI_STATUS_IGNORE), "MPI_Test");
      if (here != 0) return true;
      if (transport != nullptr) {
        static_cast<MpiTransport*>(transport)->poll_abort();  // made by attach
        if (!aborted && transport->aborted()) {
          aborted = true;
          end_s = std::min(end_s, base::now_s() + kAbortLimit_s);
        }
      }
      if (base::now_s() > end_s) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  void leave_mpi() override { left_ = true; }

 private:
  MPI_Comm own_comm() {
    if (own_comm_ == MPI_COMM_NULL) {
      check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &own_comm_), "MPI_Comm_dup");
      check_mpi(MPI_Comm_set_errhandler(own_comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    }
    return own_comm_;
  }

  // Made once for each list of ranks, and kept. Collective over them.
  MPI_Comm comm_of(std::span<const int> ranks) {
    const auto known = groups_.find({ranks.begin(), ranks.end()});
    if (known != groups_.end()) return known->second;
    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group some = MPI_GROUP_NULL;
    MPI_Comm made = MPI_COMM_NULL;
    check_mpi(MPI_Comm_group(own_comm(), &all), "MPI_Comm_group");
    check_mpi(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some),
              "MPI_Group_incl");
    check_mpi(MPI_Comm_create_group(own_comm(), some, 0, &made), "MPI_Comm_create_group");
    check_mpi(MPI_Group_free(&some), "MPI_Group_free");
    check_mpi(MPI_Group_free(&all), "MPI_Group_free");
    groups_.emplace(std::vector<int>(ranks.begin(), ranks.end()), made);
    return made;
  }

  // Made once for each number of ranks, and kept: communicators are scarce.
  MPI_Comm first_ranks(int num_ranks) {
    if (num_ranks == size_) return MPI_COMM_WORLD;
    const auto known = comms_.find(num_ranks);
    if (known != comms_.end()) return known->second;
    MPI_Comm made = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(MPI_COMM_WORLD, rank_ < num_ranks ? 0 : MPI_UNDEFINED, rank_, &made),
              "MPI_Comm_split");
    comms_.emplace(num_ranks, made);
    return made;
  }

  MpiJobOptions options_;
  bool owns_mpi_ = false;
  bool left_ = false;
  MPI_Comm own_comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  std::map<int, MPI_Comm> comms_;
  std::map<std::vector<int>, MPI_Comm> groups_;
  std::vector<MPI_Request> requests_;  ///< kept from swap to swap
};

}  // namespace
}  // namespace ferry::detail

extern "C" {
__attribute__((visibility("default"))) extern const std::uint32_t ferry_mpi_module_version =
    FERRY_MPI_INTERFACE;

__attribute__((visibility("default"))) ferry::detail::MpiJob* ferry_start_mpi_job(
    const ferry::detail::MpiJobOptions& options) {
  return new ferry::detail::Job(options);
}
}
