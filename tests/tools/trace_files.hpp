#pragma once
// Small routing traces in a directory of their own, removed with it.

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace ferry::tools {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    static std::atomic<int> number{0};
    path_ = std::filesystem::temp_directory_path() /
            ("ferry-test-" + std::to_string(getpid()) + "-" + std::to_string(number++));
    std::filesystem::create_directories(path_);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// An .npy file of version 1 with this header text and these data bytes.
inline std::string npy(const std::string& header, const std::string& data) {
  std::string bytes = "\x93NUMPY";
  bytes += '\x01';
  bytes += '\0';
  bytes += static_cast<char>(header.size() & 0xFFU);
  bytes += static_cast<char>(header.size() >> 8);
  return bytes + header + data;
}

inline std::string npy_header(const std::string& descr, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
}

/// A trace of 6 tokens in sequences of 2, 3 and 1, 2 layers, top-2 of 4 experts, hidden 16. The
/// expert of (token, layer, slot) is (token + 2 * layer + slot) mod 4.
inline void write_small_trace(const TemporaryDirectory& directory) {
  std::string data;
  for (int token = 0; token < 6; ++token) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int slot = 0; slot < 2; ++slot) {
        data += static_cast<char>((token + 2 * layer + slot) % 4);
      }
    }
  }
  directory.write("topk_idx.npy", npy(npy_header("|u1", "(6, 2, 2)"), data));
  directory.write("meta.json", R"({"model": "tiny", "num_experts": 4, "hidden": 16,)"
                               R"( "sequence_lengths": [2, 3, 1]})");
}

}  // namespace ferry::tools
