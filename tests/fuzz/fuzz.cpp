// The entry points of libFuzzer, and what else a target's program can do:
//   fuzz_TARGET --write-seeds FOLDER   writes the seeds of the target
//   fuzz_TARGET --check-seeds FOLDER   fails where the folder lacks one, or has another by its name

#include "fuzz/fuzz.hpp"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace ferry::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSuffix = ".bin";

void write_seeds(const fs::path& folder) {
  fs::create_directories(folder);
  for (const Seed& seed : seeds()) {
    std::ofstream file(folder / (seed.name + kSuffix), std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(seed.bytes.data()),
               static_cast<std::streamsize>(seed.bytes.size()));
  }
}

bool is_in_folder(const Seed& seed, const fs::path& folder) {
  std::ifstream file(folder / (seed.name + kSuffix), std::ios::binary);
  if (!file) return false;
  const std::string found((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return found.size() == seed.bytes.size() &&
         (found.empty() || std::memcmp(found.data(), seed.bytes.data(), found.size()) == 0);
}

int check_seeds(const fs::path& folder) {
  for (const Seed& seed : seeds()) {
    if (is_in_folder(seed, folder)) continue;
    std::fprintf(stderr, "%s is not what this target makes; fix: scripts/fuzz --write-seeds\n",
                 (folder / (seed.name + kSuffix)).c_str());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

}  // namespace

void require(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "fuzz target: %s\n", what.c_str());
  std::abort();
}

}  // namespace ferry::fuzz

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::strcmp((*argv)[1], "--write-seeds") == 0) {
    ferry::fuzz::write_seeds((*argv)[2]);
    std::exit(EXIT_SUCCESS);
  }
  if (*argc == 3 && std::strcmp((*argv)[1], "--check-seeds") == 0) {
    std::exit(ferry::fuzz::check_seeds((*argv)[2]));
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ferry::fuzz::run({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
