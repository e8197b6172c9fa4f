"""Compiles the device's C++ on its first use, and keeps the library below build/ for the next one."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("native")
KEPT = Path(__file__).parents[2] / "build" / "device"

# -O1, because the compiler takes a third less time than with -O2, and torch's own kernels do the work.
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-DUSE_DISTRIBUTED"]
LIBRARIES = ["torch", "torch_cpu", "torch_python", "c10"]


class NoCompilerError(Exception):
    """There is no `g++` on the PATH."""


def library() -> Path:
    """Return the library for this torch, this interpreter and these sources; compile it if there is none yet.

    Of several processes one compiles, and the others wait for it.

    Raises:
        NoCompilerError: this machine has no C++ compiler, and nothing was compiled before.
        RuntimeError: the compiler has failed; its message is part of the error.
    """
    path = KEPT / _key() / "lag_native.so"
    if path.exists():
        return path
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompilerError("there is no `g++` on the PATH; install a C++ compiler to test on the simulated device")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path)
    return path


def _compile(compiler: str, path: Path) -> None:
    unfinished = path.with_suffix(".unfinished")
    done = subprocess.run(_command(compiler, unfinished), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(done.args)} failed:\n{done.stderr}")
    unfinished.replace(path)


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(" ".join(FLAGS).encode())
    return f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


def _command(compiler: str, target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    return [
        compiler,
        *FLAGS,
        *(argument for directory in includes for argument in ("-isystem", str(directory))),
        str(SOURCES / "device.cpp"),
        "-o",
        str(target),
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
        f"-Wl,-rpath,{root / 'lib'}",
    ]
