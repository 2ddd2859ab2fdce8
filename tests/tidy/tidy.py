#!/usr/bin/env python3
"""Checks the rules of style that a machine can check, on every source file of the repository.

Run: python3 tests/tidy/tidy.py [ROOT]
Prints one line per finding, "path:line: rule: banned: X; use Y", and exits 1 if there is one.
tidy_selftest.py shows every rule firing on a bad file.
"""

import sys
from pathlib import Path

from rules import MAX_FILE_LINES, RATCHET_FILE_LINES, RULES
from source_text import SourceText

FOLDERS = ("include", "src", "tools", "tests", "bench", "examples", "python", "lab", "scripts",
           "cmake", "data", "docs", ".ci")
TOP_FILES = ("*.md", "CMakeLists.txt", "CMakePresets.json", "setup.py", "pyproject.toml")
SUFFIXES = {".hpp", ".cpp", ".py", ".md", ".txt", ".cmake", ".json", ".sh", ""}
CODE_SUFFIXES = {".hpp", ".cpp", ".py", ".cmake", ".sh"}
RATCHET = "tests/tidy/ratchet.txt"


def text_files(root):
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                yield path
    for pattern in TOP_FILES:
        yield from sorted(root.glob(pattern))


def read_ratchet(root):
    """Files over 500 lines that are known, with the length they may not pass: 'path lines'."""
    path = root / RATCHET
    limits = {}
    if path.exists():
        for line in path.read_text().splitlines():
            words = line.split("#")[0].split()
            if words:
                limits[words[0]] = int(words[1])
    return limits


def size_findings(lengths, limits):
    """A file over the limit, or a ratchet entry that is looser than its file needs."""
    for path, length in lengths.items():
        limit = min(limits.get(path, RATCHET_FILE_LINES), MAX_FILE_LINES)
        if length > limit:
            yield path, length, f"banned: {length} lines, allowed here {limit}; use two files"
    for path, limit in limits.items():
        length = lengths.get(path, 0)
        if length <= RATCHET_FILE_LINES:
            yield RATCHET, 1, f"banned: an entry for {path} ({length} lines); use none, remove it"
        elif length < limit:
            yield RATCHET, 1, f"banned: slack for {path}; use its length, {length}"


def check(root):
    """All findings below `root` as (path, line, rule, message), in order of path."""
    findings, lengths = [], {}
    for file in text_files(root):
        path = file.relative_to(root).as_posix()
        try:
            source = SourceText(path, file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            findings.append((path, 1, "utf-8", "banned: bytes that are not UTF-8; use UTF-8"))
            continue
        if file.suffix in CODE_SUFFIXES:
            lengths[path] = source.text.count("\n")
        if not source.text:
            continue
        for rule in RULES:
            if rule.applies(path):
                for line, detail in rule.find(source):
                    message = f"banned: {rule.banned} ({detail}); use {rule.use}"
                    findings.append((path, line, rule.name, message))
    for path, line, message in size_findings(lengths, read_ratchet(root)):
        findings.append((path, line, "file-length", message))
    return findings, len(lengths)


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
    findings, num_files = check(root)
    for path, line, rule, message in findings:
        print(f"{path}:{line}: {rule}: {message}")
    print(f"tidy: {num_files} code files, {len(RULES) + 2} rules, {len(findings)} finding(s)")
    if num_files == 0:
        print(f"tidy: no source under {root}; give the root of the repository")
        return 1
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
