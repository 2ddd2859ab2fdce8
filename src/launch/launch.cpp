// Which launcher started this process, and how its ranks run; see ferry/launch.hpp.

#include "ferry/launch.hpp"

#include <charconv>
#include <exception>
#include <memory>

#include <fmt/format.h>

#include "base/environment.hpp"
#include "base/log.hpp"
#include "ferry/error.hpp"
#include "ferry/progress_thread.hpp"
#include "ferry/threads.hpp"
#include "launch/job.hpp"
#include "launch/mpi_loader.hpp"
#include "transport/sole_use.hpp"

namespace ferry::launch {

namespace {

using base::environment;

int number(std::string_view variable) {
  int value = 0;
  if (const auto text = environment(variable)) {
    std::from_chars(text->data(), text->data() + text->size(), value);
  }
  return value;
}

bool is_set(std::string_view variable) { return environment(variable).has_value(); }

/// How a launcher shows itself. The first whose variable is set counts: mpirun inside a Slurm job
/// is mpirun.
struct Sign {
  std::string_view rank;
  std::string_view size;
  std::string_view name;
  std::string_view module;
};
constexpr Sign kSigns[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun of Open MPI", "openmpi"},
    {"PMI_RANK", "PMI_SIZE", "a launcher with PMI (mpiexec of MPICH, srun --mpi=pmi2)", "mpich"},
    {"PMIX_RANK", "SLURM_STEP_NUM_TASKS", "a launcher with PMIx (srun --mpi=pmix)", "openmpi"},
};

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::unsupported, text); }

void refuse_launchers_without_mpi() {
  if (is_set("TORCHELASTIC_RUN_ID")) {
    refuse(
        fmt::format("torchrun started this process, and Ferry's ranks are MPI ranks; fix: start "
                    "the program with `mpirun -n {} ...` in place of torchrun",
                    is_set("WORLD_SIZE") ? *environment("WORLD_SIZE") : "RANKS"));
  }
  if (is_set("SLURM_STEP_ID") && number("SLURM_STEP_NUM_TASKS") > 1) {
    refuse(
        fmt::format("srun started {} tasks without PMI, so they cannot find each other; fix: "
                    "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)",
                    number("SLURM_STEP_NUM_TASKS")));
  }
}

void check_choice(const std::string& mpi) {
  if (mpi == "auto" || mpi == "off" || mpi == "openmpi" || mpi == "mpich") return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("mpi = '{}'; allowed: auto, openmpi, mpich, off; fix: correct it", mpi));
}

void run_rank(Transport& transport, const std::function<void(Transport&)>& body) {
  try {
    body(transport);
    if (transport.sole_use()->is_forked()) return;  // its end is the parent's business
    transport.attachment.reset();
  } catch (const std::exception& failure) {
    transport.abort(fmt::format("rank {} failed: {}", transport.rank(), failure.what()));
    throw;
  } catch (...) {
    transport.abort(fmt::format("rank {} failed", transport.rank()));
    throw;
  }
}

void run_in_job(const Launcher& launcher, const Options& options,
                const std::function<void(Transport&, detail::MpiJob*)>& body) {
  check_job_options(launcher, options);
  const auto job = detail::start_job(
      launcher, {.many_threads = options.progress_thread, .deadline_s = options.deadline_s});
  check_shape(launcher, options.topology, job->size());
  const auto transport = job->attach(job->size(), options.topology ? &*options.topology : nullptr);
  if (transport->rank() == 0) {
    base::log(LogLevel::info, "{} started {} ranks; {}; nodes: {}", launcher.name, job->size(),
              job->mpi(), transport->topology().describe());
  }
  std::exception_ptr failure;
  try {
    run_rank(*transport, [&](Transport& own) { body(own, job.get()); });
  } catch (...) {
    failure = std::current_exception();
  }
  // All ranks end MPI together, or none: MPI_Finalize waits for ranks that have failed. A forked
  // child is no rank.
  const double limit_s = failure ? kFailedLimit_s : kEndLimit_s;
  if (transport->sole_use()->is_forked() || !job->meet(limit_s, transport.get())) job->leave_mpi();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

std::optional<Launcher> find_launcher() {
  for (const Sign& sign : kSigns) {
    if (!is_set(sign.rank)) continue;
    return Launcher{.name = std::string(sign.name),
                    .module = std::string(sign.module),
                    .num_ranks = number(sign.size),
                    .rank = number(sign.rank)};
  }
  refuse_launchers_without_mpi();
  return std::nullopt;
}

std::optional<Launcher> choose_launcher(const std::string& asked) {
  const std::string mpi = asked == "auto" ? environment("FERRY_MPI").value_or("auto") : asked;
  check_choice(mpi);
  if (mpi == "off") return std::nullopt;
  const std::optional<Launcher> launcher = find_launcher();
  if (mpi == "auto") return launcher;
  if (!launcher) {
    refuse(
        fmt::format("mpi = {}, but no launcher started this process; fix: start it with "
                    "mpirun, or use mpi = auto to run all ranks as threads",
                    mpi));
  }
  if (launcher->module != mpi) {
    refuse(
        fmt::format("{} started this process, and the module {} is of the other MPI; fix: use "
                    "mpi = auto, or the launcher of {}",
                    launcher->name, mpi, mpi));
  }
  return launcher;
}

void run_with_job(const Options& options,
                  const std::function<void(Transport&, detail::MpiJob*)>& ranks_body) {
  check_choice(options.mpi);
  const auto body = [&](Transport& transport, detail::MpiJob* job) {
    std::optional<ProgressThread> progress;
    if (options.progress_thread) progress.emplace(transport);
    ranks_body(transport, job);
  };
  if (const auto launcher = choose_launcher(options.mpi)) {
    run_in_job(*launcher, options, body);
    return;
  }
  threads::Options threads_options{.link_bits_per_s = options.link_bits_per_s};
  threads_options.topology = options.topology;
  threads::run(threads_options, [&](Transport& transport) { body(transport, nullptr); });
}

void run(const Options& options, const std::function<void(Transport&)>& body) {
  run_with_job(options, [&](Transport& transport, detail::MpiJob*) { body(transport); });
}

}  // namespace ferry::launch
