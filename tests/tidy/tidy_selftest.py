#!/usr/bin/env python3
"""Shows that every rule of the tidy test fires on a bad file, at the right line, and on no good one.

Run: python3 tests/tidy/tidy_selftest.py
Each case is a small tree in a temporary directory; every rule must have at least one case.
"""

import tempfile
import unittest
from pathlib import Path

from rules import MAX_FUNCTION_LINES, RULES
from source_text import SourceText
from tidy import RATCHET, check

# Banned words are put together here, so that this file has none of them.
UNFINISHED = "TO" + "DO"
PURPOSE = "// A file of the self-test, with a purpose.\n"
HEADER = "#pragma once\n" + PURPOSE

# (rule, path, text, lines where the rule must fire)
BAD = [
    ("layering", "src/plan/a.cpp", PURPOSE + '#include "wire/headers.hpp"\n', [2]),
    ("layering", "src/transport/a.cpp", PURPOSE + '#include "plan/experts.hpp"\n', [2]),
    ("layering", "src/base/a.hpp", HEADER + '#include "kernels/row_kernels.hpp"\n', [3]),
    ("layering", "src/wire/a.cpp", PURPOSE + '#include "exchange/a.hpp"\n', [2]),
    ("layering", "src/novel/a.cpp", PURPOSE, [1]),
    ("public-includes", "include/ferry/a.hpp", HEADER + '#include "plan/a.hpp"\n', [3]),
    ("public-includes", "examples/a.cpp", PURPOSE + '#include "base/hash.hpp"\n', [2]),
    ("mpi", "src/transport/threads.cpp", PURPOSE + "#include <mpi.h>\n", [2]),
    ("simd", "src/exchange/a.cpp", PURPOSE + "#include <immintrin.h>\n", [2]),
    ("simd", "src/plan/a.cpp", PURPOSE + '#include "hwy/highway.h"\n', [2]),
    ("exchange-wait", "src/exchange/a.cpp", "std::this_thread::sleep_for(x);\n", [1]),
    ("exchange-wait", "src/exchange/a.cpp", "std::this_thread::yield();\n_mm_pause();\n", [1, 2]),
    ("exchange-wait", "src/exchange/a.cpp", "std::thread worker(run);\n", [1]),
    ("exchange-wait", "src/exchange/a.cpp", "std::mutex m;\nstd::lock_guard l(m);\n", [1, 2]),
    ("exchange-wait", "src/exchange/a.cpp", "std::condition_variable ready;\n", [1]),
    ("exchange-spin", "src/exchange/a.cpp", "while (!transport.reached(flag, 1)) {}\n", [1]),
    ("exchange-includes", "src/exchange/a.cpp", PURPOSE + "#include <mutex>\n", [2]),
    ("exchange-includes", "src/exchange/a.cpp", PURPOSE + '#include "base/clock.hpp"\n', [2]),
    ("wait-once", "src/exchange/a.cpp", "transport.wait_until(waiter);\n", [1]),
    ("wait-once", "tools/a.cpp", "transport.wait_until(waiter);\n", [1]),
    ("wait-once", "src/exchange/pending.cpp", "int finish() { return 0; }\n", [1]),
    ("clock", "src/transport/a.cpp", "auto t = std::chrono::steady_clock::now();\n", [1]),
    ("printing", "src/plan/a.cpp", "std::cout << 1;\nprintf(text);\nfmt::print(text);\n", [1, 2, 3]),
    ("ending", "src/plan/a.cpp", "std::abort();\nexit(1);\nabort();\n", [1, 2, 3]),
    ("environment", "src/base/a.cpp", 'auto v = std::getenv("HOME");\n', [1]),
    ("random", "tests/plan/a.cpp", "int i = rand() % 7;\nstd::random_device d;\n", [1, 2]),
    ("names", "src/plan/a.cpp", "void copy(int src, int dst_rank);\n", [1]),
    ("default", "src/plan/a.cpp",
     "int f(Kind k) {\n  switch (k) {\n    case Kind::a: { if (k) { g(); } break; }\n    default: return 1;\n"
     "  }\n}\n", [2]),
    ("unfinished", "src/plan/a.cpp", f"// {UNFINISHED}: the other half\n", [1]),
    ("unfinished", "docs/a.md", f"# A\n\n{UNFINISHED}\n", [3]),
    ("pragma-once", "src/plan/a.hpp", PURPOSE + "int f();\n", [1]),
    ("purpose", "src/plan/a.hpp", "#pragma once\n#include <vector>\n", [1]),
    ("purpose", "src/plan/a.cpp", "#include <vector>\n" * 61, [1]),
    ("columns", "src/plan/a.cpp", PURPOSE + "int " + "x" * 100 + ";\n", [2]),
    ("tabs", "scripts/a.sh", "if true; then\n\techo\nfi\n", [2]),
    ("function-length", "src/plan/a.cpp",
     "int f(int a) {\n" + "  g();\n" * MAX_FUNCTION_LINES + "}\n", [1]),
    ("file-length", "src/plan/a.cpp", PURPOSE + "int a;\n" * 500, [501]),
    ("utf-8", "docs/a.md", b"caf\xe9\n", [1]),
]

# Each of these must pass every rule.
GOOD = {
    "src/plan/a.cpp": PURPOSE
    + '#include "base/hash.hpp"\n#include "ferry/routing.hpp"\n#include "plan/experts.hpp"\n'
    + "// std::cout, rand(), getenv(x) and exit(1) are only words here.\n"
    + 'const char* kText = "printf(x); std::abort();";\n'
    + "std::string text = fmt::format(kText);\nint n = 1'000'000; char c = '\"';\n"
    + "int f(int k) {\n  switch (k) {\n    case 1: return 2;\n    case kLast: return 3;\n"
    + "    default: return 0;\n  }\n}\n",
    "src/transport/mpi_world.cpp": PURPOSE + "#include <mpi.h>\nvoid f() { wait_until(w); }\n",
    "src/transport/threads.cpp": PURPOSE
    + "#include <mutex>\nvoid f() {\n  transport.abort(text);\n  world->abort(text);\n}\n",
    "src/kernels/sum.cpp": PURPOSE + '#include "hwy/highway.h"\n',
    "src/kernels/lanes-inl.hpp": PURPOSE + "#if defined(FERRY_LANES) == defined(HWY_TARGET_TOGGLE)\n",
    "src/exchange/pending.cpp": PURPOSE
    + "std::thread::id owner;\nvoid f() {\n  transport.wait_until(w);\n"
    + "  while (!queue.empty()) step();\n}\n",
    "include/ferry/a.hpp": HEADER + '#include "ferry/error.hpp"\nclass A {\n'
    + "  int f();\n" * 80
    + "};\n",
    "tests/plan/a_test.cpp": PURPOSE + "namespace {\n" + "int g();\n" * 80 + "}\n",
}


def findings_of(files):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())
        return check(root)[0]


class TidySelfTest(unittest.TestCase):
    def test_every_bad_file_is_found(self):
        for rule, path, text, lines in BAD:
            with self.subTest(rule=rule, text=text[:60]):
                found = findings_of({path: text})
                self.assertEqual(
                    [line for at, line, name, _ in found if name == rule and at == path], lines, found
                )

    def test_every_message_says_what_to_use(self):
        for rule, path, text, _ in BAD:
            for _, _, _, message in findings_of({path: text}):
                self.assertRegex(message, r"^banned: .+; use .+", rule)

    def test_every_rule_has_a_bad_file(self):
        self.assertEqual({rule.name for rule in RULES} - {rule for rule, *_ in BAD}, set())

    def test_good_files_pass(self):
        self.assertEqual(findings_of(GOOD), [])

    def test_ratchet_allows_its_length_and_no_more(self):
        long_file = {"src/plan/a.cpp": PURPOSE + "int a;\n" * 599}
        self.assertEqual(findings_of({**long_file, RATCHET: "src/plan/a.cpp 600\n"}), [])
        for entry in ("src/plan/a.cpp 599", "src/plan/a.cpp 700", "src/plan/a.cpp 600\nother.cpp 600"):
            found = findings_of({**long_file, RATCHET: entry + "\n"})
            self.assertEqual([name for _, _, name, _ in found], ["file-length"], entry)

    def test_ratchet_never_passes_the_hard_limit(self):
        found = findings_of(
            {"src/plan/a.cpp": PURPOSE + "int a;\n" * 899, RATCHET: "src/plan/a.cpp 900\n"}
        )
        self.assertEqual([name for _, _, name, _ in found], ["file-length"])

    def test_code_keeps_its_lines(self):
        text = '/* a\n b */ int x; // y\nauto s = R"(z\n)"; char c = \'\\\'\';\n'
        code = SourceText("a.cpp", text).code
        self.assertEqual(code.count("\n"), text.count("\n"))
        self.assertEqual(code.split(), "int x; auto s = ; char c = ;".split())


if __name__ == "__main__":
    unittest.main()
