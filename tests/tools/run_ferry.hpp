#pragma once
// Runs the ferry binary and keeps what it printed.

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/trace_files.hpp"

namespace ferry::tools {

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// `prefix` comes before the binary: variables, or a launcher.
inline Outcome ferry_at(const std::filesystem::path& program, const std::string& arguments,
                        const std::string& prefix = "") {
  const TemporaryDirectory directory;
  const std::filesystem::path out = directory.path() / "out";
  const std::filesystem::path err = directory.path() / "err";
  const std::string line = prefix + " '" + program.string() + "' " + arguments + " >'" +
                           out.string() + "' 2>'" + err.string() + "' </dev/null";
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, content_of(out), content_of(err)};
}

/// The binary of this build.
inline Outcome ferry(const std::string& arguments, const std::string& prefix = "") {
  return ferry_at(FERRY_COMMAND, arguments, prefix);
}

inline std::vector<nlohmann::json> json_lines(const std::string& text) {
  std::vector<nlohmann::json> objects;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    objects.push_back(nlohmann::json::parse(line));
  }
  return objects;
}

}  // namespace ferry::tools
