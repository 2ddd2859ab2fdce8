// MPI for programs that do not link it; see mpi_module.hpp.

#include "transport/mpi/mpi_module.hpp"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <thread>

#include "base/clock.hpp"
#include "ferry/error.hpp"
#include "ferry/mpi.hpp"
#include "transport/mpi/mpi_comm.hpp"

namespace ferry::detail {

namespace {

constexpr double kAbortLimit_s = 5;

class Job final : public MpiJob {
 public:
  explicit Job(const MpiJobOptions& options) : options_(options) {
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
    if (owns_mpi_ && !mpi_has_ended()) MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::string mpi() const override {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    const std::string whole(text.data(), static_cast<std::size_t>(length));
    return whole.substr(0, whole.find_first_of(",\n"));
  }

  std::unique_ptr<Transport> attach(int num_ranks, const Topology* topology) override {
    const MPI_Comm comm = first_ranks(num_ranks);
    if (comm == MPI_COMM_NULL) return nullptr;
    mpi::AttachOptions options{.topology = {}, .deadline_s = options_.deadline_s};
    if (topology != nullptr) options.topology = *topology;
    return mpi::attach(comm, options);
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
        // The end of the job may come as a message; the rest is for ranks that have ended.
        static_cast<void>(transport->probe());
        if (!aborted && transport->aborted()) {
          aborted = true;
          end_s = std::min(end_s, base::now_s() + kAbortLimit_s);
        }
      }
      if (base::now_s() > end_s) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  void leave_mpi() override { owns_mpi_ = false; }

 private:
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
  int rank_ = 0;
  int size_ = 1;
  std::map<int, MPI_Comm> comms_;
};

}  // namespace
}  // namespace ferry::detail

extern "C" {
__attribute__((visibility("default"))) extern const int ferry_mpi_module_version =
    ferry::detail::kMpiModuleVersionHere;

__attribute__((visibility("default"))) ferry::detail::MpiJob* ferry_start_mpi_job(
    const ferry::detail::MpiJobOptions& options) {
  return new ferry::detail::Job(options);
}
}
