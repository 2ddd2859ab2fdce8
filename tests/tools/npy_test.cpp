// Arrays of every allowed type are read; everything else is refused with the reason and the fix.

#include "common/npy.hpp"

#include <gtest/gtest.h>

#include "common/failures.hpp"
#include "tools/trace_files.hpp"

namespace ferry::tools {
namespace {

std::string refusal(const std::filesystem::path& path) {
  try {
    read_npy(path);
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Npy, ReadsIntegersOfEveryWidthAndSign) {
  const TemporaryDirectory directory;
  const struct {
    const char* descr;
    std::string data;
    std::int64_t value;
  } cases[] = {{"|u1", "\xFF", 255},
               {"|i1", "\xFF", -1},
               {"<u2", std::string("\x01\x80", 2), 0x8001},
               {"<i2", std::string("\x01\x80", 2), -32767},
               {"<i4", std::string("\xFF\xFF\xFF\xFF", 4), -1},
               {"<i8", std::string("\xFE\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8), -2},
               {"<u8", std::string("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8), 0x7FFFFFFFFFFFFFFF}};
  for (const auto& one : cases) {
    const NpyArray array =
        read_npy(directory.write("a.npy", npy(npy_header(one.descr, "(1,)"), one.data)));
    EXPECT_EQ(array.integer(0), one.value) << one.descr;
  }
}

TEST(Npy, ReadsVersion2AndAnyKeyOrder) {
  const TemporaryDirectory directory;
  const std::string header = "{'shape': (1, 2), 'fortran_order': False, 'descr': '<f4'}";
  std::string bytes = "\x93NUMPY";
  bytes += std::string("\x02\x00", 2);
  bytes += static_cast<char>(header.size());
  bytes += std::string(3, '\0');
  const NpyArray array =
      read_npy(directory.write("a.npy", bytes + header + std::string("\0\0\x80\x3F\0\0\0\xC0", 8)));
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(array.number(0), 1.0);
  EXPECT_EQ(array.number(1), -2.0);
}

TEST(Npy, RefusesWhatItIsNotAndSaysWhy) {
  const TemporaryDirectory directory;
  const struct {
    std::string bytes;
    const char* why;
  } cases[] = {
      {"PK\x03\x04 a zip, not an array", "does not begin"},
      {std::string("\x93NUMPY\x03\x00", 8) + std::string(8, '\0'), "version is 3"},
      {npy(npy_header(">i4", "(1,)"), "abcd"), "'>i4'"},
      {npy(npy_header("<c8", "(1,)"), "abcdefgh"), "'<c8'"},
      {npy("{'descr': '|u1', 'fortran_order': True, 'shape': (1,), }", "a"), "Fortran"},
      {npy("{'descr': '|u1', 'shape': (1,), }", "a"), "lacks one of the keys"},
      {npy("{'descr': '|u1', 'other': 1}", "a"), "unknown key 'other'"},
      {npy(npy_header("|u1", "(2, -3)"), "a"), "not a tuple of sizes"},
      {npy(npy_header("|u1", "(3,)"), "ab"), "needs 3 bytes of data, the file has 2"},
      {npy(npy_header("|u1", "(3,)"), "abcd"), "needs 3 bytes of data, the file has 4"},
      {npy(npy_header("<i8", "(4294967296, 4294967296)"), ""), "more than 2^63"},
      {npy(npy_header("|u1", "(1,)") + "junk", "a"), "goes on after"},
  };
  for (const auto& one : cases) {
    const std::string text = refusal(directory.write("bad.npy", one.bytes));
    EXPECT_NE(text.find(one.why), std::string::npos) << text;
    EXPECT_NE(text.find("bad.npy"), std::string::npos) << text;
    EXPECT_NE(text.find("fix:"), std::string::npos) << text;
  }
}

TEST(Npy, RefusesEveryShorterFile) {
  const TemporaryDirectory directory;
  const std::string whole = npy(npy_header("|u1", "(2, 3)"), "abcdef");
  ASSERT_EQ(read_npy(directory.write("a.npy", whole)).num_items(), 6);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_NE(refusal(directory.write("a.npy", whole.substr(0, length))), "accepted") << length;
  }
}

TEST(Npy, NamesAFileThatIsNotThere) {
  const TemporaryDirectory directory;
  EXPECT_NE(refusal(directory.path() / "none.npy").find("no such file"), std::string::npos);
}

}  // namespace
}  // namespace ferry::tools
