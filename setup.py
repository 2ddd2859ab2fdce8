"""Builds the Python package ferry with the CMake build of the library, and nothing else.

pip install --no-build-isolation .
FERRY_BUILD=DIR takes what stands in that build folder, and compiles nothing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def version():
    """The one of the library; a copy without its CMakeLists.txt asks the build it is made for."""
    listed = ROOT / "CMakeLists.txt"
    if listed.exists():
        return re.search(r"project\(ferry VERSION ([\d.]+)", listed.read_text()).group(1)
    cache = (Path(os.environ["FERRY_BUILD"]) / "CMakeCache.txt").read_text()
    return re.search(r"^CMAKE_PROJECT_VERSION:STATIC=([\d.]+)$", cache, re.M).group(1)


class CMakeBuild(build_ext):
    """Puts the extension module and the MPI modules beside the Python files."""

    def run(self):
        build = Path(os.environ.get("FERRY_BUILD", Path(self.build_temp) / "cmake")).resolve()
        if "FERRY_BUILD" not in os.environ:
            off = [f"-DFERRY_BUILD_{part}=OFF" for part in ("TOOLS", "TESTS", "EXAMPLES")]
            subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
                            f"-DFERRY_PYTHON={self.interpreter()}", *off], check=True)
            subprocess.run(["cmake", "--build", str(build), "--target", "ferry_python",
                            "--parallel", str(os.cpu_count() or 1)], check=True)
        target = Path(self.get_ext_fullpath("ferry._ferry")).resolve().parent.parent
        subprocess.run(["cmake", "--install", str(build), "--component", "ferry_python",
                        "--prefix", str(target)], check=True)

    @staticmethod
    def interpreter():
        """Of a virtual environment the one it was made from: that one has the headers."""
        return os.path.realpath(sys.executable)


setup(version=version(), ext_modules=[Extension("ferry._ferry", sources=[])],
      cmdclass={"build_ext": CMakeBuild})
