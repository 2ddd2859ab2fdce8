// The file that processes of a test job map, and the run of one program on them.

#include "support/mpi_program.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include <fmt/format.h>

#include "base/environment.hpp"
#include "ferry/launch.hpp"
#include "launch/mpi_loader.hpp"
#include "support/rank_program.hpp"
#include "transport/unique_fd.hpp"

namespace ferry::support {
namespace {

constexpr int kMostRanks = 64;
constexpr double kEndLimit_s = 30;

/// How the body of one rank ended.
struct Ending {
  int failed = 0;
  int code = -1;  ///< an ErrorCode, -1 = no ferry::Error
  std::array<char, 4000> text{};
};

struct SharedFile {
  Meeting::State meeting;
  std::array<std::uint64_t, kMostRanks> values;
  std::array<Ending, kMostRanks> endings;
};

SharedFile* map_file() {
  const auto path = base::environment("FERRY_TEST_FILE");
  if (!path) throw std::runtime_error("under a launcher FERRY_TEST_FILE names a file for the job");
  const detail::UniqueFd file(::open(path->c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!file.valid() || ::ftruncate(file.get(), sizeof(SharedFile)) != 0) {
    throw std::runtime_error("cannot open " + *path);
  }
  void* const mapped =
      ::mmap(nullptr, sizeof(SharedFile), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("cannot map " + *path);
  return static_cast<SharedFile*>(mapped);
}

/// The job of this process, for as long as it lives.
struct JobFile {
  std::unique_ptr<detail::MpiJob> job;
  SharedFile* file = nullptr;
};

JobFile& job_file() {
  static JobFile made{
      detail::start_job(*launch::find_launcher(),
                        {.many_threads = wants_progress_threads(), .deadline_s = kEndLimit_s}),
      map_file()};
  return made;
}

Failure failure_of(const Ending& ending) {
  Failure failure{.code = {}, .text = ending.text.data()};
  if (ending.code >= 0) failure.code = static_cast<ErrorCode>(ending.code);
  return failure;
}

void note(const Failure& failure, Ending& ending) {
  ending.failed = 1;
  ending.code = failure.code ? static_cast<int>(*failure.code) : -1;
  std::strncpy(ending.text.data(), failure.text.c_str(), ending.text.size() - 1);
}

void meet(const std::string& where) {
  if (job_file().job->meet(kEndLimit_s, nullptr)) return;
  throw std::runtime_error("a process of the job did not come to the " + where);
}

// Of all ranks, once all have written theirs; nobody writes again before all have read.
void read_endings(std::vector<std::optional<Failure>>& failures) {
  meet("end of a program");
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    const Ending& ending = job_file().file->endings[rank];
    failures[rank] = ending.failed != 0 ? std::optional(failure_of(ending)) : std::nullopt;
  }
  meet("end of reading");
}

}  // namespace

bool MpiProgram::is_on() {
  static const bool on = launch::find_launcher().has_value();
  return on;
}

int MpiProgram::job_rank() { return job_file().job->rank(); }
int MpiProgram::job_size() { return job_file().job->size(); }

MpiProgram::MpiProgram(const Topology& topology) : topology_(topology) {
  if (topology.num_ranks() <= job_size()) return;
  throw std::runtime_error(
      fmt::format("{} ranks in a job of {} processes", topology.num_ranks(), job_size()));
}

void MpiProgram::run(const RankBody& body, std::vector<std::optional<Failure>>& failures) {
  SharedFile& file = *job_file().file;
  if (job_rank() == 0) {
    file.meeting.members = topology_.num_ranks();
    file.meeting.arrived = 0;
    for (Ending& ending : file.endings) ending = {};
  }
  meet("start of a program");
  if (const auto transport = job_file().job->attach(topology_.num_ranks(), &topology_)) {
    try {
      Meeting meeting(file.meeting);
      body(*transport, meeting);
      transport->attachment.reset();
    } catch (...) {
      Ending& own = file.endings[static_cast<std::size_t>(transport->rank())];
      note(describe_exception(std::current_exception()), own);
      transport->abort(fmt::format("rank {} failed: {}", transport->rank(), own.text.data()));
    }
  }
  read_endings(failures);
}

void MpiProgram::gather(std::vector<std::uint64_t>& values) {
  const auto own = static_cast<std::size_t>(job_rank());
  SharedFile& file = *job_file().file;
  if (own < values.size()) file.values[own] = values[own];
  meet("values of a program");
  std::copy_n(file.values.begin(), values.size(), values.begin());
  meet("end of reading");
}

void MpiProgram::gather(std::vector<std::optional<Failure>>& failures) {
  const auto own = static_cast<std::size_t>(job_rank());
  if (own < failures.size()) {
    Ending& ending = job_file().file->endings[own];
    ending = {};
    if (failures[own]) note(*failures[own], ending);
  }
  read_endings(failures);
}

}  // namespace ferry::support
