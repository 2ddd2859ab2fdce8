// A rank without a body to run; see ferry/launch.hpp.

#include <memory>
#include <utility>

#include <fmt/format.h>

#include "ferry/error.hpp"
#include "ferry/launch.hpp"
#include "ferry/threads.hpp"
#include "launch/job.hpp"
#include "launch/mpi_loader.hpp"

namespace ferry::launch {

namespace {

detail::MpiJobOptions job_options(const Options& options) {
  return {.many_threads = options.progress_thread, .deadline_s = options.deadline_s};
}

std::unique_ptr<Transport> only_rank(const Options& options,
                                     const std::optional<Topology>& topology) {
  if (topology && topology->num_ranks() != 1) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the shape {} has {} ranks, but no launcher started this process; fix: "
                            "start it with mpirun, or run the ranks as threads",
                            topology->describe(), topology->num_ranks()));
  }
  return threads::World({.link_bits_per_s = options.link_bits_per_s}).join(0);
}

}  // namespace

void check_job_options(const Launcher& launcher, const Options& options) {
  if (options.link_bits_per_s <= 0) return;
  throw Error(ErrorCode::unsupported,
              fmt::format("link_bits_per_s = {:g} under {}: only ranks that are threads have links "
                          "with a rate; fix: leave it out, the network has its own",
                          options.link_bits_per_s, launcher.name));
}

void check_shape(const Launcher& launcher, const std::optional<Topology>& shape, int job_size) {
  if (!shape || shape->num_ranks() == job_size) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("the shape {} has {} ranks, but {} started {}; fix: leave the shape to "
                          "the launcher, or make them equal",
                          shape->describe(), shape->num_ranks(), launcher.name, job_size));
}

Session::Session(const Options& options)
    : options_(options), launcher_(choose_launcher(options.mpi)) {
  if (!launcher_) return;
  check_job_options(*launcher_, options_);
  job_ = detail::start_job(*launcher_, job_options(options_));
}

Session::~Session() { leave(kFailedLimit_s); }

std::unique_ptr<Transport> Session::attach(const std::optional<Topology>& topology) {
  const std::optional<Topology>& shape = topology ? topology : options_.topology;
  if (!job_) return only_rank(options_, shape);
  check_shape(*launcher_, shape, job_->size());
  return job_->attach(job_->size(), shape ? &*shape : nullptr);
}

void Session::end() { leave(kEndLimit_s); }

// All ranks end MPI together, or none: MPI_Finalize waits for ranks that have failed.
void Session::leave(double limit_s) {
  if (!job_) return;
  try {
    if (!job_->meet(limit_s, nullptr)) job_->leave_mpi();
  } catch (const Error&) {
    job_->leave_mpi();  // MPI is in no state to be asked
  }
  job_.reset();
}

std::unique_ptr<Transport> attach(const void* comm, const Options& options) {
  if (options.mpi != "openmpi" && options.mpi != "mpich") {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("mpi = '{}'; allowed for a communicator: openmpi, mpich; fix: name the "
                            "MPI that the program uses",
                            options.mpi));
  }
  const Launcher program{.name = "the program", .module = options.mpi};
  const auto job = detail::start_job(program, job_options(options));
  return job->attach_to(comm, options.topology ? &*options.topology : nullptr);
}

}  // namespace ferry::launch
