"""The Python side of shim.c: compiles the shim, and controls the one with which this process was started.

The shim is a library for LD_PRELOAD. It logs the system calls that change files, and kills the process at a chosen call
or makes the call fail.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_name("shim.c")


class NoCompilerError(Exception):
    """There is no `cc` on the PATH."""


def build(directory: Path) -> Path:
    """Put the shim into `directory`, and return its path. It is compiled once for this process.

    Raises:
        NoCompilerError: this machine has no C compiler.
    """
    library = directory / "shim.so"
    library.write_bytes(_compiled())
    return library


@cache
def _compiled() -> bytes:
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompilerError("there is no `cc` on the PATH; install a C compiler to run the fault campaign")
    with TemporaryDirectory() as directory:
        library = Path(directory) / "shim.so"
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        return library.read_bytes()


def environment(library: Path) -> dict[str, str]:
    """Return the environment of a process that loads the shim, and that has no threads before it forks."""
    # In LD_PRELOAD a space ends a path, but in LD_LIBRARY_PATH it does not. The loader searches the directories of
    # LD_LIBRARY_PATH for a bare name.
    directories = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | {
        "LD_PRELOAD": library.name,
        "LD_LIBRARY_PATH": ":".join(directories),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.shim_configure.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.shim_match.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.shim_kill_at.argtypes = [ctypes.c_long, ctypes.c_int]
    library.shim_fail_at.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.shim_calls.restype = ctypes.c_long
    return library


def configure(directory: Path, log: Path) -> None:
    """Watch the files below `directory` from now on, and append all calls that change them to `log`."""
    error = _library().shim_configure(os.fsencode(directory.resolve()), os.fsencode(log))
    if error:
        raise OSError(error, os.strerror(error), str(log))


def match(name: str = "", call_kind: int = 0) -> None:
    """Make `kill_at` and `fail_at` count only calls of a kind (0: any) on files whose names begin with `name`."""
    _library().shim_match(os.fsencode(name), call_kind)


def kill_at(call: int, torn_permille: int = 0) -> None:
    """Kill this process at the `call`-th watched call from now, after `torn_permille` of a write's sectors."""
    _library().shim_kill_at(call, torn_permille)


def fail_at(call: int, error: int, *, sticky: bool = False) -> None:
    """Make the `call`-th watched call from now fail, and all later ones too if `sticky`. Call 0 ends the failures."""
    _library().shim_fail_at(call, error, int(sticky))


def calls() -> int:
    """Return the number of watched calls so far."""
    return int(_library().shim_calls())
