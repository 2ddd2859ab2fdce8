#!/usr/bin/env python3
"""Uses an installed Ferry as a stranger would; ctest runs one part of it per test.

prefix installs the build into WORK/first and moves it to WORK/moved: every other part sees only the
moved prefix, so all of them also show that nothing names the place where it was installed.
Exit codes: 0 passed, 1 failed, 77 skipped because a tool is missing here.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
EXPECTED_LINES = 4  # hello_dispatch prints one line per rank


def fail(text):
    print(f"install_test: {text}")
    sys.exit(1)


def run(command, **options):
    """Runs a command, shows it, and returns its output; its failure is the test's."""
    print("+", " ".join(map(str, command)), flush=True)
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            check=False, **options)
    if result.returncode != 0:
        fail(f"exit code {result.returncode}:\n{result.stdout}")
    return result.stdout


def check_hello(program, args):
    """hello_dispatch verifies its sums itself; here: it ran, and every rank said so."""
    libraries = {**os.environ, "LD_LIBRARY_PATH": str(args.moved / args.libdir)}
    lines = run([program], env=libraries).splitlines()
    good = [line for line in lines if re.fullmatch(r"rank \d on node \d: \d+ rows came; .*", line)]
    if len(good) != EXPECTED_LINES or len(lines) != EXPECTED_LINES:
        fail(f"{program} printed {lines}; expected {EXPECTED_LINES} lines, one per rank")


def own_copy(args, name):
    """A folder of its own with the example in it: nothing of the source tree is near."""
    folder = args.work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(args.source / "examples" / "hello_dispatch.cpp", folder / "program.cpp")
    return folder


def prefix(args):
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    first = args.work / "first"
    run(["cmake", "--install", args.build, "--prefix", first])
    first.rename(args.moved)


def tree(args):
    """Everything is there, no text names a place, and the command runs from where it stands."""
    library = args.moved / args.libdir
    wanted = [library / "cmake" / "ferry" / name
              for name in ("ferryConfig.cmake", "ferryConfigVersion.cmake", "ferryTargets.cmake",
                           "FindIsal.cmake")]
    wanted.append(library / "pkgconfig" / "ferry.pc")
    wanted += [library / "ferry" / f"ferry_mpi_{mpi}.so" for mpi in args.mpis.split(",") if mpi]
    for path in wanted:
        if not path.is_file():
            fail(f"{path.relative_to(args.moved)} was not installed")
    if not list(library.glob("libferry_exchange.*")):
        fail(f"no libferry_exchange in {args.libdir}: {sorted(library.iterdir())}")
    for path in sorted(args.moved.rglob("*")):
        if path.suffix not in (".cmake", ".pc", ".hpp"):
            continue
        for place in (args.source, args.build, args.work):
            if str(place) in path.read_text():
                fail(f"{path.relative_to(args.moved)} names {place}; the prefix cannot be moved")
    if args.command:
        said = run([args.moved / args.bindir / "ferry", "--version"])
        if args.version not in said:
            fail(f"the installed command says '{said.strip()}', expected version {args.version}")


def traces(args):
    """Those of the source tree came along, and the command runs its default from where it stands."""
    if not args.command:
        print("SKIPPED: a build without the command installs no traces")
        sys.exit(SKIPPED)
    source = args.source / "data" / "traces"
    place = (args.moved / args.bindir / ".." / "share" / "ferry" / "traces").resolve()
    for domain in ("scripture", "speeches"):
        for name in ("topk_idx.npy", "topk_weights.npy", "meta.json"):
            path = Path("ferry_lm") / domain / name
            if not (source / path).is_file():
                fail(f"data/traces/{path} is missing")
            if not (place / path).is_file():
                fail(f"share/ferry/traces/{path} was not installed")
            if (place / path).read_bytes() != (source / path).read_bytes():
                fail(f"share/ferry/traces/{path} is not what stands in data/traces")
    said = run([args.moved / args.bindir / "ferry", "bench", "--strategy", "node_dedup",
                "--hidden", "64", "--repeat", "1", "--mpi", "off", "--json"])
    result = json.loads(said.splitlines()[-1])
    if not result["verified"] or result["trace"] != str(place / "ferry_lm" / "scripture"):
        fail(f"ferry bench without flags ran {result['routing']} {result['trace']}; expected the "
             f"installed trace ferry_lm/scripture:\n{said}")


def mpi_flags():
    """What an MPI program is compiled with here; None where there is no MPI."""
    for name in ("ompi-c", "mpich"):
        said = subprocess.run(["pkg-config", "--cflags", name], text=True, capture_output=True,
                              check=False)
        if said.returncode == 0:
            return [flag.replace("-I", "-isystem") for flag in said.stdout.split()]
    return None


def headers(args):
    """Exactly the public headers; each compiles alone and includes only its like and std."""
    include = args.moved / args.includedir
    installed = {path.relative_to(include).as_posix() for path in include.rglob("*")
                 if path.is_file()}
    public = {f"ferry/{path.name}" for path in (args.source / "include" / "ferry").glob("*.hpp")}
    if installed != public:
        fail(f"headers differ from include/ferry: {sorted(installed ^ public)}")
    for name in sorted(installed):
        for line in (include / name).read_text().splitlines():
            found = re.match(r'\s*#\s*include\s*(<[^>]*>|"[^"]*")', line)
            if not found:
                continue
            path = found.group(1)[1:-1]
            standard = found.group(1)[0] == "<" and re.fullmatch(r"[a-z_]+", path)
            standard = standard or (name, path) == ("ferry/mpi.hpp", "mpi.h")
            if not standard and path not in installed:
                fail(f"{name} includes {found.group(1)}; allowed: installed headers and std")
        # Only the prefix is given: a header that needs more does not compile here.
        needs = mpi_flags() if name == "ferry/mpi.hpp" else []
        if needs is None:
            continue
        run([args.cxx, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", include,
             *needs, "-include", f"ferry/{name.removeprefix('ferry/')}", "-x", "c++", "/dev/null"])


def configure(args, folder, wanted):
    return ["cmake", "-G", args.generator, "-B", folder / "build",
            "-S", args.source / "tests" / "install" / "consumer",
            f"-DCMAKE_PREFIX_PATH={args.moved}", f"-DCMAKE_CXX_COMPILER={args.cxx}",
            f"-DPROGRAM={folder / 'program.cpp'}", f"-DWANTED={wanted}"]


def find_package(args):
    folder = own_copy(args, "with_cmake")
    minor = ".".join(args.version.split(".")[:2])
    run(configure(args, folder, minor))
    run(["cmake", "--build", folder / "build"])
    check_hello(folder / "build" / "consumer", args)


def version(args):
    """The package refuses to be a version that it is not."""
    folder = own_copy(args, "with_version")
    command = configure(args, folder, "99.0")
    result = subprocess.run(command, text=True, capture_output=True, check=False)
    if result.returncode == 0 or args.version not in result.stderr:
        fail(f"find_package(ferry 99.0) ended with {result.returncode}; expected a refusal that "
             f"names {args.version}:\n{result.stderr}")


def pkg_config(args):
    tool = shutil.which("pkg-config")
    if tool is None:
        print("SKIPPED: no pkg-config here; install pkgconf to run this test")
        sys.exit(SKIPPED)
    folder = own_copy(args, "with_pkg_config")
    # Before the system's, not in its place: fmt, Highway and ISA-L have their files there.
    known = {**os.environ, "PKG_CONFIG_PATH": str(args.moved / args.libdir / "pkgconfig")}
    said = run([tool, "--modversion", "ferry"], env=known).strip()
    if said != args.version:
        fail(f"ferry.pc says version {said}, expected {args.version}")
    flags = run([tool, "--cflags", "--libs", "ferry"], env=known).split()
    run([args.cxx, "-std=c++20", "program.cpp", "-o", "program", *flags], cwd=folder)
    check_hello(folder / "program", args)


def cleanup(args):
    shutil.rmtree(args.work, ignore_errors=True)


def main():
    parts = {part.__name__: part
             for part in (prefix, tree, traces, headers, find_package, version, pkg_config, cleanup)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts)
    for name in ("source", "build", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--mpis", default="")
    for name in ("libdir", "bindir", "includedir", "version", "cxx", "generator"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--command", type=int, choices=(0, 1), required=True,
                        help="1: the build has the ferry command")
    args = parser.parse_args()
    args.moved = args.work / "moved"
    parts[args.part](args)


if __name__ == "__main__":
    main()
