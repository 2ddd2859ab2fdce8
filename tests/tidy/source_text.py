"""C++ text as the tidy rules see it: code without comments and literals, includes, blocks.

Nothing here parses C++; it is enough that lines keep their numbers and that words in comments and
strings are never taken for code.
"""

import re
from dataclasses import dataclass
from functools import cached_property

_TOKEN = re.compile(
    r"""//[^\n]*                                   # comment to the end of the line
      | /\*.*?\*/                                  # block comment
      | R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"   # raw string
      | "(?:\\.|[^"\\\n])*"                        # string
      | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'        # character, not a digit separator
    """,
    re.VERBOSE | re.DOTALL,
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
_FUNCTION_HEAD = re.compile(r"\)\s*(const|noexcept|override|final|mutable|&|\s|->[^{};]*|try)*$")
_CONTAINER_HEAD = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()]*$")


def _blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


@dataclass
class Include:
    line: int
    path: str
    quoted: bool


@dataclass
class Block:
    """One pair of braces; `head` is the code before it, back to the last ; { or }."""

    head: str
    begin: int
    end: int
    body: str


class SourceText:
    def __init__(self, path, text):
        self.path = path
        self.text = text
        self.lines = text.split("\n")

    @cached_property
    def code(self):
        return _TOKEN.sub(_blank, self.text)

    @cached_property
    def code_lines(self):
        return self.code.split("\n")

    @cached_property
    def includes(self):
        found = []
        for number, line in enumerate(self.lines, 1):
            match = _INCLUDE.match(line)
            if match:
                found.append(Include(number, match.group(2), match.group(1) == '"'))
        return found

    def line_of(self, offset):
        return self.code.count("\n", 0, offset) + 1

    @cached_property
    def blocks(self):
        """All brace blocks, outer ones after their inner ones; preprocessor lines left out."""
        code = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", _blank, self.code, flags=re.MULTILINE)
        found, stack, start = [], [], 0
        for match in re.finditer(r"[{};]", code):
            at = match.start()
            if code[at] == "{":
                stack.append((at, code[start:at]))
            elif code[at] == "}" and stack:
                opened, head = stack.pop()
                found.append(
                    Block(head, self.line_of(opened), self.line_of(at), code[opened + 1 : at])
                )
            start = at + 1
        return found

    @cached_property
    def functions(self):
        """Blocks that look like function bodies, each with the line where its head begins."""
        candidates = [
            block
            for block in self.blocks
            if _FUNCTION_HEAD.search(block.head.rstrip())
            and not _CONTAINER_HEAD.search(block.head)
            and not re.match(r"\s*(if|for|while|switch|else|catch|do)\b", block.head)
        ]
        return [
            block
            for block in candidates
            if not any(o.begin < block.begin and block.end < o.end for o in candidates)
        ]
