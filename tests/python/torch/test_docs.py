"""The programs of docs/pytorch.md, run as they stand there."""

import re

import pytest

from conftest import ROOT

PAGE = ROOT / "docs/pytorch.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program(number, capsys):
    exec(compile(PROGRAMS[number], f"{PAGE.name}, program {number}", "exec"), {})
    capsys.readouterr()


def test_the_page_has_programs_and_names_what_there_is():
    import ferry.torch
    assert len(PROGRAMS) == 6
    for name in re.findall(r"`([A-Za-z_]+)\(", PAGE.read_text()):
        assert hasattr(ferry.torch, name) or name in ("backward", "ProcessGroup"), name
