"""The package as users get it: types, and pip install into an environment of its own."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import ferry

HERE = Path(__file__).parent
BUILD = os.environ.get("FERRY_TEST_BUILD", "")


def run(command, limit_s=200, **options):
    said = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False,
                          **options)
    assert said.returncode == 0, f"{command}\n{said.stdout}\n{said.stderr}"
    return said.stdout


def needs(tool):
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"no {tool}")
    return found


def test_types_are_right(tmp_path):
    mypy = needs("mypy")
    folder = Path(ferry.__file__).parent
    # ferry.torch is left out: the types of PyTorch 1.13 contradict --strict, and take a minute to read.
    modules = [word for file in sorted(folder.glob("*.py"))
               for word in ("-m", "ferry" if file.stem == "__init__" else f"ferry.{file.stem}")]
    run([mypy, "--python-executable", sys.executable, "--strict", "--cache-dir", tmp_path,
         *modules], cwd=folder.parent)
    run([mypy, "--python-executable", sys.executable, "--strict", "--cache-dir", tmp_path,
         HERE / "programs" / "typed.py"], env={**os.environ, "MYPYPATH": str(folder.parent)})
    run([sys.executable, "-B", HERE / "programs" / "typed.py"])


def test_stubs_name_what_there_is():
    from ferry import _ferry
    stub = (Path(ferry.__file__).parent / "_ferry.pyi").read_text()
    names = {"module": set(), **{}}
    current = "module"
    for line in stub.splitlines():
        words = line.replace("(", " ").replace(":", " ").split()
        if not line.startswith(" ") and words:
            current = "module"
        if words[:1] == ["class"]:
            current = words[1]
            names["module"].add(current)
            names[current] = set()
        elif words[:1] == ["def"]:
            names[current].add(words[1])
        elif line and not line.startswith((" ", "from", "import", "_T", '"', "@", "#")):
            if ":" in line:
                names["module"].add(words[0])
    for where, stubbed in names.items():
        real = _ferry if where == "module" else getattr(_ferry, where)
        there = {name for name in vars(real)
                 if not name.startswith("_") or name in stubbed}
        stubbed = {name for name in stubbed if name not in ("__hash__", "__eq__", "__init__")}
        there -= {"__hash__", "__eq__", "__init__", "__doc__", "__name__"}
        assert stubbed == there, where


def test_public_things_are_explained():
    for name in ferry.__all__:
        thing = getattr(ferry, name)
        if name == "__version__":
            continue
        assert thing.__doc__, name
        if isinstance(thing, type):
            for part, value in vars(thing).items():
                if not part.startswith("_") and callable(value):
                    assert value.__doc__, f"{name}.{part}"


@pytest.mark.skipif(not BUILD, reason="FERRY_TEST_BUILD names no build to install")
def test_pip_install(tmp_path):
    """As docs/python.md says, but from the build that is there: nothing is compiled again."""
    for tool in ("cmake",):
        needs(tool)
    source = tmp_path / "source"
    root = HERE.parents[1]
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "python"):
        path = root / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, source / name)
    place = tmp_path / "venv"
    venv.create(place, system_site_packages=True, with_pip=True)
    python = place / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run([python, "-m", "pip", "install", "--no-build-isolation", "--no-index", "--no-deps", source],
        env={**clean, "FERRY_BUILD": BUILD})
    code = ("import ferry, sys; print(ferry.__file__, ferry.__version__);"
            "print(ferry.run(lambda group: group.all_gather(bytes([group.rank])), 2, 1))")
    said = run([python, "-c", code], env=clean, cwd=tmp_path)
    assert str(place) in said and said.endswith("[[b'\\x00', b'\\x01'], [b'\\x00', b'\\x01']]\n")
    folder = Path(said.split()[0]).parent
    for mpi in filter(None, os.environ.get("FERRY_TEST_MPIS", "").split(",")):
        assert (folder / f"ferry_mpi_{mpi}.so").is_file()
    assert (folder / "py.typed").is_file() and (folder / "_ferry.pyi").is_file()
    shown = run([python, "-m", "pip", "show", "ferry-moe"], env=clean)
    assert f"Version: {ferry.__version__}" in shown
