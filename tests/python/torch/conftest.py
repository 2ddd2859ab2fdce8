"""One thread per rank and a fixed seed: the tests share their cores with others."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
try:
    import ferry  # noqa: F401 - from PYTHONPATH or an installation
except ImportError:
    sys.path.insert(0, str(ROOT / "build/release/python"))
    pytest.importorskip("ferry", reason="build the target ferry_python, or set PYTHONPATH")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20240611)
