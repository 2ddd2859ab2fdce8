#pragma once
// A folder with a copy of the ferry binary in bin, as if it was installed there; removed with it.

#include <filesystem>
#include <string>

#include "tools/trace_files.hpp"

namespace ferry::tools {

class FerryFolder {
 public:
  FerryFolder() {
    std::filesystem::create_directories(path() / "bin");
    std::filesystem::copy_file(FERRY_COMMAND, program());
  }

  const std::filesystem::path& path() const { return directory_.path(); }
  std::filesystem::path program() const { return path() / "bin" / "ferry"; }
  /// Where the program looks for the trace that comes with it.
  std::filesystem::path trace() const {
    return path() / "share" / "ferry" / "traces" / "ferry_lm" / "scripture";
  }
  /// Puts a trace there: that of write_small_trace, of the domain "prose".
  void add_trace() const {
    const TemporaryDirectory made;
    write_small_trace(made);
    made.write("meta.json", R"({"model": "tiny", "domain": "prose", "num_experts": 4,)"
                            R"( "hidden": 16, "sequence_lengths": [2, 3, 1]})");
    std::filesystem::create_directories(trace());
    std::filesystem::copy(made.path(), trace());
  }

 private:
  TemporaryDirectory directory_;
};

}  // namespace ferry::tools
