"""Every test ends: one that hangs for four minutes is cut off with the stacks of all threads."""

import faulthandler
import sys

import pytest

LIMIT_S = 240


@pytest.fixture(autouse=True)
def time_limit():
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
