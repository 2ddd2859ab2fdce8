#!/usr/bin/env python3
"""Compares pages of docs/ with the code and with arithmetic.

Run: python3 tests/docs/docs_test.py errors|strategies|figures|links [ROOT]
Prints one line per finding, "page: what; fix: ...", and exits 1 if there is one.
"""

import re
import sys
from math import comb
from pathlib import Path

EXPERTS, TOPK, RANKS_PER_NODE = 256, 8, 8
GROUPS, GROUPS_PER_TOKEN = 8, 4


def read(root, path):
    return (root / path).read_text(encoding="utf-8")


def enumerators(root, header, name):
    body = re.search(rf"enum class {name}\b[^{{]*{{(.*?)}};", read(root, header), re.S).group(1)
    code = re.sub(r"//.*", "", body)
    return re.findall(r"\b([a-z]\w*)\b(?:\s*=\s*\d+)?\s*(?:,|$)", code)


def sections(text):
    return re.findall(r"^## +(.+?)\s*$", text, re.M)


def without_asserts(code):
    """Assertions are about Ferry's own promises; their texts are no refusals of input."""
    for start in reversed([match.start() for match in re.finditer(r"\bFERRY_ASSERT\w*\(", code)]):
        depth, at = 0, code.index("(", start)
        while True:
            depth += {"(": 1, ")": -1}.get(code[at], 0)
            if depth == 0:
                break
            at += 1
        code = code[:start] + code[at + 1:]
    return code


def text_prefixes(root):
    """What texts of refusals begin with, such as "placement:", and one file that has it."""
    found = {}
    for path in sorted((root / "src").rglob("*.[ch]pp")):
        code = re.sub(r"^\s*#.*", "", path.read_text(encoding="utf-8"), flags=re.M)
        code = without_asserts(re.sub(r'"\s*\n\s*"', "", code))
        for prefix in re.findall(r'"((?:[a-z_]+::)?[A-Za-z_]+:) ', code):
            found.setdefault(prefix, path.relative_to(root))
    return found


def check_errors(root):
    page = "docs/errors.md"
    text = read(root, page)
    codes = enumerators(root, "include/ferry/error.hpp", "ErrorCode")
    if len(codes) < 2:
        yield f"{page}: no enumerators found in error.hpp; fix: mend this test"
    for code in codes:
        if code not in sections(text):
            yield f"{page}: no section for ErrorCode::{code}; fix: write '## {code}'"
        if f"[{code}](#{code})" not in text:
            yield f"{page}: the table of codes lacks {code}; fix: add a row that links its section"
    for section in sections(text):
        if re.fullmatch(r"[a-z_]+", section) and section not in codes:
            yield f"{page}: section {section} is no ErrorCode; fix: remove or rename it"
    for prefix, path in text_prefixes(root).items():
        if f"`{prefix}`" not in text:
            yield f"{page}: texts of {path} begin with {prefix}; fix: say there what `{prefix}` means"


def check_strategies(root):
    for strategy in enumerators(root, "include/ferry/options.hpp", "Strategy"):
        if strategy not in sections(read(root, "docs/algorithms.md")):
            yield f"docs/algorithms.md: no section for {strategy}; fix: write '## {strategy}'"
        if f"| `{strategy}` |" not in read(root, "docs/names.md"):
            yield f"docs/names.md: no row for {strategy}; fix: name what others call it, or none"
        if f"`{strategy}`" not in read(root, "docs/concepts.md"):
            yield f"docs/concepts.md: {strategy} is missing; fix: add it to the strategies"


def distinct_places(places):
    missed = comb(EXPERTS - EXPERTS // places, TOPK) / comb(EXPERTS, TOPK)
    return places * (1 - missed)


def rows_per_token(nodes):
    """Closed forms, by strategy: what crosses at dispatch under uniform routing."""
    remote = 1 - 1 / nodes
    return {"flat": TOPK * remote, "node_gather": nodes - 1,
            "rank_dedup": remote * distinct_places(nodes * RANKS_PER_NODE),
            "node_dedup": remote * distinct_places(nodes)}


def rows_per_token_in_groups(nodes):
    per_node, per_group = GROUPS // nodes, EXPERTS // GROUPS
    chosen = GROUPS_PER_TOKEN * per_group
    hit = 0
    for here in range(per_node + 1):
        probability = (comb(per_node, here) * comb(GROUPS - per_node, GROUPS_PER_TOKEN - here)
                       / comb(GROUPS, GROUPS_PER_TOKEN))
        hit += probability * (1 - comb(chosen - here * per_group, TOPK) / comb(chosen, TOPK))
    return (nodes - 1) * hit


def tables(text):
    """Tables with a column `nodes`: (column name -> cell) for each row."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[cell.strip(" `") for cell in line.strip("|").split("|")]
                for line in block.splitlines()]
        if rows[0][0].startswith("nodes"):
            yield [dict(zip(rows[0], row)) for row in rows[2:]]


def wrong(cell, value):
    """True where a printed figure is not the value, rounded to the figure's own places."""
    places = len(cell.partition(".")[2])
    return abs(float(cell) - value) > 0.5 * 10 ** -places + 1e-9


def check_figures(root):
    num_figures = 0
    row_bytes = 7168 * 2
    for page in ("docs/algorithms.md", "docs/concepts.md"):
        for table in tables(read(root, page)):
            for row in table:
                nodes = int(next(iter(row.values())))
                expected = rows_per_token(nodes)
                if float(row.get("flat", "0")) > TOPK:  # more than k rows: a table in MB
                    expected = {name: rows * 4096 * row_bytes / 1e6
                                for name, rows in expected.items()}
                expected["uniform"] = expected["node_dedup"]
                if nodes <= GROUPS:
                    expected["4 of 8 groups"] = rows_per_token_in_groups(nodes)
                for name, cell in list(row.items())[1:]:
                    num_figures += 1
                    if wrong(cell, expected[name]):
                        yield (f"{page}: {name} at {nodes} nodes is {cell}; "
                               f"fix: {expected[name]:.4f}, from the closed form")
    if num_figures < 16:
        yield f"docs/algorithms.md: only {num_figures} figures found; fix: mend this test"
    yield from check_headers(root)


def check_headers(root):
    """Header sizes, which pages repeat, are those of the code."""
    code, pages = read(root, "src/wire/headers.hpp"), {
        page: read(root, f"docs/{page}.md") for page in ("algorithms", "wire-formats")}
    fragment, metadata = (re.search(rf"k{kind}HeaderBytes = (\d+)", code).group(1)
                          for kind in ("Fragment", "Metadata"))
    for page, words in (("algorithms", f"fragments x {fragment}"),
                        ("algorithms", f"fragment_bytes - {fragment})"),
                        ("wire-formats", f"Fragment header: {fragment} bytes"),
                        ("wire-formats", f"Metadata header: {metadata} bytes")):
        if words not in pages[page]:
            yield f"docs/{page}.md: '{words}' is missing; fix: the sizes of src/wire/headers.hpp"


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def prose(text):
    return re.sub(r"```.*?```", "", text, flags=re.S)


def pages(root):
    return sorted(root.glob("*.md")) + sorted((root / "docs").glob("*.md"))


def check_links(root):
    linked = set()
    for page in pages(root):
        name = page.relative_to(root).as_posix()
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, fragment = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{name}: link to {target}, which does not exist; fix: correct the path"
                continue
            if page.parent == root:
                linked.add(file)
            if fragment and file.suffix == ".md":
                headings = re.findall(r"^#+ +(.+?)\s*$", prose(file.read_text(encoding="utf-8")),
                                      re.M)
                if fragment not in map(anchor, headings):
                    yield f"{name}: link to {target}, which has no such heading; fix: correct it"
    for page in sorted((root / "docs").glob("*.md")):
        if page.resolve() not in linked:
            yield (f"docs/{page.name}: no page at the top links it; "
                   "fix: link it in README.md or ARCHITECTURE.md")


CHECKS = {"errors": check_errors, "strategies": check_strategies, "figures": check_figures,
          "links": check_links}


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in CHECKS:
        print(f"usage: docs_test.py {'|'.join(CHECKS)} [ROOT]")
        return 2
    root = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parents[2]).resolve()
    findings = list(CHECKS[sys.argv[1]](root))
    print("\n".join(findings) if findings else f"docs {sys.argv[1]}: as the code has it")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
