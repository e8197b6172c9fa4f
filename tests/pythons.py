"""Runs targets of the Makefile with other interpreters.

`python3 -m tests.pythons TARGET... [--newest] [--with PYTHON...]`

Finds the Pythons of this machine on the PATH and below pyenv's directory; the classifiers of pyproject.toml name the
supported versions. Each interpreter has its own environment in build/pythons/VERSION, which is kept. This module must
need nothing but the standard library, because it runs before any environment exists.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A program that prints the version of its interpreter. It prints an empty line for the interpreter of a virtual
# environment, which is a link to another one, and for a pre-release. It fails if the interpreter cannot make
# environments; Debian has the modules for that in extra packages.
PROBE = """
import sys, ensurepip, venv
original = sys.prefix == sys.base_prefix and sys.version_info.releaselevel == "final"
print("%d.%d.%d" % sys.version_info[:3] if original else "")
"""
PROBE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Python:
    """An interpreter; `version` is (major, minor, micro)."""

    version: tuple[int, int, int]
    executable: str

    @property
    def name(self) -> str:
        """The version as text."""
        return ".".join(map(str, self.version))


def supported(pyproject: Path = ROOT / "pyproject.toml") -> set[tuple[int, int]]:
    """Return the versions (major, minor) that pyproject.toml's classifiers name."""
    classifiers: list[str] = tomllib.loads(pyproject.read_text())["project"]["classifiers"]
    found = (re.fullmatch(r"Programming Language :: Python :: (\d+)\.(\d+)", line) for line in classifiers)
    return {(int(match[1]), int(match[2])) for match in found if match}


def candidates() -> Iterator[str]:
    """Yield the paths of executables that are named like interpreters; those on the PATH come first."""
    names = ["python3", *(f"python{major}.{minor}" for major, minor in sorted(supported()))]
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    # pyenv's shims are skipped, because a shim starts only interpreters that pyenv has switched on.
    directories = [Path(entry) for entry in os.get_exec_path() if Path(entry) != pyenv / "shims"]
    for directory in [*directories, *sorted(pyenv.glob("versions/*/bin"))]:
        yield from (str(directory / name) for name in names if os.access(directory / name, os.X_OK))


def probed(executable: str) -> Python | None:
    """Ask an executable for its version. Return None if it cannot be used; print the reason if it fails."""
    try:
        done = subprocess.run(
            [executable, "-I", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{executable} is left out: {error}", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{executable} is left out: {(done.stderr.splitlines() or ['it fails'])[-1]}", file=sys.stderr)
        return None
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", done.stdout.strip())
    return Python((int(numbers[1]), int(numbers[2]), int(numbers[3])), executable) if numbers else None


def find(executables: Iterable[str]) -> list[Python]:
    """Return the supported interpreters among executables, oldest first; for each version, the first that was named."""
    versions = supported()
    found: dict[tuple[int, int, int], Python] = {}
    for executable in dict.fromkeys(executables):
        python = probed(executable)
        if python is not None and python.version[:2] in versions:
            found.setdefault(python.version, python)
    return sorted(found.values())


def make(targets: list[str], python: Python) -> int:
    """Run make with an interpreter, in that interpreter's environment, and return make's exit status."""
    # The environment holds the variables of the calling make. Its flags are left out, because they name a job server
    # to which this process has no open descriptor.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", *targets, f"VENV=build/pythons/{python.name}", f"PYTHON={python.executable}"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> None:
    """Run the targets with each interpreter, and exit with status 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.pythons", description=__doc__)
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="target of the Makefile")
    parser.add_argument("--newest", action="store_true", help="with the newest interpreter only")
    parser.add_argument("--with", dest="pythons", nargs="*", metavar="PYTHON", help="with these interpreters only")
    args = parser.parse_args()
    named = [shutil.which(name) or name for name in args.pythons or ()]
    pythons = find(named or candidates())
    if not pythons:
        wanted = ", ".join(".".join(map(str, version)) for version in sorted(supported()))
        raise SystemExit(f"none of Python {wanted} was found; name them: make test-pythons PYTHONS='python3.12 ...'")
    results = []
    for python in pythons[-1:] if args.newest else pythons:
        print(f"Python {python.name}, {python.executable}: make {' '.join(args.targets)}", flush=True)
        started = time.monotonic()
        status = make(args.targets, python)
        results.append((python, status, time.monotonic() - started))
    for python, status, seconds in results:
        ending = "passed" if status == 0 else f"FAILED with status {status}"
        print(f"Python {python.name}, {python.executable}: {ending} after {seconds:.0f} s")
    raise SystemExit(any(status for _, status, _ in results))


if __name__ == "__main__":
    main()
