// Loading of ferry_mpi_openmpi.so and ferry_mpi_mpich.so.

#include "launch/mpi_loader.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/environment.hpp"
#include "ferry/error.hpp"

namespace ferry::detail {

namespace {

namespace fs = std::filesystem;

/// The folder of the program or shared library that holds this code.
fs::path own_folder() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&start_job), &info) == 0) return {};
  std::error_code error;
  fs::path file = fs::canonical(info.dli_fname, error);
  // A program that was found on PATH has a name without a folder.
  if (error) file = fs::read_symlink("/proc/self/exe", error);
  return file.parent_path();
}

std::vector<std::string> module_files(const std::string& module) {
  const std::string file = "ferry_mpi_" + module + ".so";
  std::vector<std::string> files;
  if (const auto folder = base::environment("FERRY_MODULE_PATH")) {
    files.push_back((fs::path(*folder) / file).string());
  }
  const fs::path here = own_folder();
  for (const char* const beside : {".", "ferry", "../lib", "../lib/ferry", FERRY_LIBDIR_FROM_BIN}) {
    files.push_back((here / beside / file).lexically_normal().string());
  }
  return files;
}

const char* package_of(const std::string& module) {
  return module == "mpich" ? "libmpich-dev" : "libopenmpi-dev";
}

void* load(const launch::Launcher& launcher) {
  std::vector<std::string> folders;
  for (const std::string& file : module_files(launcher.module)) {
    std::error_code error;
    if (!fs::exists(file, error)) {
      folders.push_back(fs::path(file).parent_path().string());
      continue;
    }
    // Open MPI loads parts of itself that look for its symbols among the global ones.
    if (void* const loaded = ::dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL)) return loaded;
    throw Error(ErrorCode::unsupported,
                fmt::format("{} started this process, but its module cannot be loaded: {}; fix: "
                            "install the MPI it was built with",
                            launcher.name, ::dlerror()));
  }
  throw Error(ErrorCode::unsupported,
              fmt::format("{} started this process, but there is no ferry_mpi_{}.so in {}; fix: "
                          "build Ferry with {} (cmake says `MPI modules`), set FERRY_MODULE_PATH, "
                          "or FERRY_MPI=off to run every process on its own",
                          launcher.name, launcher.module, fmt::join(folders, ", "),
                          package_of(launcher.module)));
}

}  // namespace

std::unique_ptr<MpiJob> start_job(const launch::Launcher& launcher, const MpiJobOptions& options) {
  void* const module = load(launcher);
  const auto* const version = static_cast<const std::uint32_t*>(::dlsym(module, kMpiModuleVersion));
  const auto start = reinterpret_cast<StartMpiJob*>(::dlsym(module, kStartMpiJob));
  if (version == nullptr || *version != FERRY_MPI_INTERFACE || start == nullptr) {
    throw Error(ErrorCode::unsupported,
                fmt::format("ferry_mpi_{}.so is of another version of Ferry; fix: install both of "
                            "the same build",
                            launcher.module));
  }
  std::unique_ptr<MpiJob> job(start(options));
  if (launcher.num_ranks > 0 && job->size() != launcher.num_ranks) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{} started {} ranks, but {} sees {}; fix: use the module of the "
                            "launcher's MPI (FERRY_MPI=auto), or the launcher of the module's MPI",
                            launcher.name, launcher.num_ranks, job->mpi(), job->size()));
  }
  return job;
}

}  // namespace ferry::detail
