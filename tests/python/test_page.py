"""The programs of docs/python.md, run as they stand there."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"
PROGRAMS = re.findall(r"```python\n(import .*?)```", PAGE.read_text(), re.S)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program(number, capsys):
    exec(compile(PROGRAMS[number], f"{PAGE.name}, program {number}", "exec"), {})
    capsys.readouterr()


def test_the_page_has_programs():
    assert len(PROGRAMS) == 2
