"""The rules of the tidy test. Each names what is banned and what to use in its place.

A rule is a function from a SourceText to (line, detail) pairs, or a pattern that code must not
match, with the paths it holds for. A path is relative to the repository, with forward slashes.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Callable

# What each folder of src/ may include of src/, besides itself; the public headers always.
# In this order plan stands below wire: a wire message carries plan's Membership.
LAYERS = {
    "base": set(),
    "kernels": {"base"},
    "plan": {"base"},
    "wire": {"base", "kernels", "plan"},
    "transport": {"base", "kernels"},
    "exchange": {"base", "kernels", "plan", "wire", "transport"},
    "launch": {"base", "transport"},
}
MAX_COLUMNS = 100
MAX_FILE_LINES = 800
RATCHET_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
PURPOSE_FROM_LINES = 60
WAIT_FILE = "src/exchange/pending.cpp"


@dataclass
class Rule:
    name: str
    banned: str
    use: str
    applies: Callable[[str], bool]
    find: Callable


def under(*folders):
    return lambda path: path.startswith(folders)


def is_cpp(path):
    return path.endswith((".hpp", ".cpp"))


def is_header(path):
    return path.endswith(".hpp")


def is_guarded_once(path):
    """Highway includes an -inl.hpp once per SIMD target; such a file has Highway's own guard."""
    return is_header(path) and not path.endswith("-inl.hpp")


def cpp_under(*folders):
    return lambda path: is_cpp(path) and path.startswith(folders)


def matches(pattern):
    """Finds a pattern in code, line by line; comments and literals do not count."""
    compiled = re.compile(pattern)

    def find(source):
        for number, line in enumerate(source.code_lines, 1):
            match = compiled.search(line)
            if match:
                yield number, match.group(0).strip()

    return find


def _layer_of(path):
    parts = PurePosixPath(path).parts
    return parts[1] if len(parts) > 2 and parts[0] == "src" else None


def find_layering(source):
    layer = _layer_of(source.path)
    if layer not in LAYERS:
        yield 1, f"src/{layer} is not in the table of layers (tests/tidy/rules.py)"
        return
    for include in source.includes:
        folder = include.path.split("/")[0]
        if not include.quoted or folder == "hwy" or "/" not in include.path:
            continue
        if folder not in LAYERS[layer] | {layer, "ferry"}:
            yield include.line, f'{layer} includes "{include.path}"'


def find_public_includes(source):
    for include in source.includes:
        if include.quoted and not include.path.startswith("ferry/"):
            yield include.line, f'"{include.path}"'


def find_mpi(source):
    if "mpi" in re.split(r"[_.]", PurePosixPath(source.path).name):
        return
    for include in source.includes:
        if include.path == "mpi.h":
            yield include.line, "<mpi.h>"


def find_simd(source):
    for include in source.includes:
        if re.match(r"(hwy/|[a-z]*mmintrin\.h|immintrin\.h|x86intrin\.h|arm_neon\.h)", include.path):
            yield include.line, include.path


def find_wait_includes(source):
    banned = {"mutex", "shared_mutex", "condition_variable", "semaphore", "latch", "barrier",
              "future", "chrono", "ctime", "base/clock.hpp", "pthread.h"}
    for include in source.includes:
        if include.path in banned:
            yield include.line, include.path


def find_wait_calls(source):
    if source.path != WAIT_FILE:
        yield from matches(r"\bwait_until\s*\(")(source)
    elif not re.search(r"\bwait_until\s*\(", source.code):
        yield 1, "no wait_until here: the one wait has moved; change WAIT_FILE with it"


def find_pragma_once(source):
    if not any(line.strip() == "#pragma once" for line in source.lines):
        yield 1, "no #pragma once"


def find_purpose(source):
    long_enough = is_header(source.path) or len(source.lines) > PURPOSE_FROM_LINES
    if not long_enough:
        return
    first = next((line for line in source.lines if line.strip() not in ("", "#pragma once")), "")
    if not re.match(r"//\s*\S.{15,}", first):
        yield 1, f"begins with '{first.strip()[:40]}'"


def find_long_lines(source):
    for number, line in enumerate(source.lines, 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns"


def find_tabs(source):
    for number, line in enumerate(source.lines, 1):
        if "\t" in line:
            yield number, "tab"


def find_long_functions(source):
    for block in source.functions:
        length = block.end - block.begin + 1
        if length > MAX_FUNCTION_LINES:
            yield block.begin, f"{length} lines"


def find_default(source):
    """A default where some case is a name: names in a case are enumerators, kX is a constant."""
    for block in source.blocks:
        if not re.search(r"\bswitch\s*\([^;]*\)\s*$", block.head):
            continue
        own, inner = block.body, True
        while inner:
            own, inner = re.subn(r"\{[^{}]*\}", " ", own)
        named = re.search(r"\bcase\s+(?:[A-Za-z_]\w*::)*(?!k[A-Z])[A-Za-z_]\w*\s*:(?!:)", own)
        if named and re.search(r"\bdefault\s*:", own):
            yield block.begin, named.group(0).strip()


def find_unfinished(source):
    # Written so that these lines do not match themselves.
    pattern = re.compile(r"\b(TO" r"DO|T" r"BD|FIX" r"ME|XX" r"X)\b")
    for number, line in enumerate(source.lines, 1):
        match = pattern.search(line)
        if match:
            yield number, match.group(0)


LIBRARY = cpp_under("src/", "include/")
IN_EXCHANGE = cpp_under("src/exchange/")
ALL_CPP = is_cpp


def outside(folders, applies):
    return lambda path: applies(path) and not path.startswith(folders)


RULES = [
    Rule("layering", "an include of a higher layer", "only the layers below, or move the type down",
         cpp_under("src/"), find_layering),
    Rule("public-includes", "an include of src/ in a public header or an example",
         'public headers ("ferry/...") and the standard library',
         cpp_under("include/", "examples/"), find_public_includes),
    Rule("mpi", "<mpi.h> outside mpi files", "a file whose name has the word mpi",
         ALL_CPP, find_mpi),
    Rule("simd", "SIMD headers here", "a kernel of src/kernels, called through Transport",
         outside(("src/kernels/", "src/transport/"), LIBRARY), find_simd),
    Rule("exchange-wait", "sleeping, yielding, spinning or threads in src/exchange",
         "a step that asks Transport::reached and returns", IN_EXCHANGE,
         matches(r"\b(sleep_for|sleep_until|usleep|nanosleep|sched_yield|this_thread::yield"
                 r"|_mm_pause|std::thread\b(?!::id)|jthread|std::async|pthread_create|futex"
                 r"|condition_variable\w*|(?:\w+_)?mutex|lock_guard|unique_lock|scoped_lock)\b")),
    Rule("exchange-spin", "a loop that waits for a flag or a message in src/exchange",
         "a step that asks once and returns; it is called again",
         outside(WAIT_FILE, IN_EXCHANGE),
         matches(r"\bwhile\s*\(.*![\w.>\-]*\b(reached|sent|map_region)\s*\(")),
    Rule("exchange-includes", "headers of clocks and locks in src/exchange",
         "Transport, which waits and keeps deadlines", IN_EXCHANGE, find_wait_includes),
    Rule("wait-once", "Transport::wait_until outside " + WAIT_FILE, "Pending::wait",
         outside("src/transport/", cpp_under("src/", "tools/", "examples/")), find_wait_calls),
    Rule("clock", "a clock outside src/base", "base::now_s() of base/clock.hpp",
         outside("src/base/", LIBRARY),
         matches(r"\b((steady|system|high_resolution)_clock|clock_gettime|gettimeofday|__rdtsc)\b")),
    Rule("printing", "printing in the library", "ferry::Error, or a value for the caller to print",
         LIBRARY,
         matches(r"\bstd::(cout|cerr|clog)\b|\bfmt::print\b|\b(f|v|vf)?printf\s*\(|\bf?puts\s*\(")),
    Rule("ending", "ending the process in the library", "ferry::Error, or FERRY_ASSERT", LIBRARY,
         matches(r"\bstd::(exit|abort|terminate|quick_exit)\s*\("
                 r"|(?<![\w.>:])(_?exit\s*\(|abort\s*\(\s*\))")),
    Rule("environment", "getenv in the library",
         "a field of an options struct; else base/environment.hpp, which lists all variables",
         outside("src/base/environment.cpp", LIBRARY),
         matches(r"\b(secure_)?getenv\s*\(")),
    Rule("random", "rand()", "base::mix64 of a seed that the caller gives", ALL_CPP,
         matches(r"(?<![\w.>])s?rand\s*\(|\brandom_device\b")),
    Rule("names", "src and dst as names", "source and target", cpp_under("src/", "include/", "tools/"),
         matches(r"\b(src|dst)(_\w*)?\b")),
    Rule("default", "default: in a switch over an enum", "every case, and a return after the switch",
         cpp_under("src/", "include/", "tools/"), find_default),
    Rule("unfinished", "a note of unfinished work", "the work, or an entry in the issue tracker",
         outside("tests/tidy/", lambda path: True), find_unfinished),
    Rule("pragma-once", "a header without #pragma once", "#pragma once as its first line",
         is_guarded_once, find_pragma_once),
    Rule("purpose", "a file that does not say what it is for",
         "a comment paragraph at its start: purpose and invariants", ALL_CPP, find_purpose),
    Rule("columns", f"lines over {MAX_COLUMNS} columns", "a line break", ALL_CPP, find_long_lines),
    Rule("tabs", "tabs", "spaces", lambda path: True, find_tabs),
    Rule("function-length", f"functions over {MAX_FUNCTION_LINES} lines", "a function for each step",
         cpp_under("src/", "include/", "tools/"), find_long_functions),
]
