"""The machine of a result: hardware, kernel, file system and software.

This module must never name the host or a path.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.measure import BenchmarkError

ROOT = Path(__file__).parents[2]


def describe(directory: Path) -> dict[str, Any]:
    """Return the machine's CPU, memory (bytes) and kernel, and the file system type and device of `directory`."""
    device = _mount_of(directory)
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": device[0],
        "device": device[1],
    }


def provenance() -> dict[str, Any]:
    """Return the date (UTC), the git commit (None outside a checkout), and the versions of Python and torch."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def check_free_bytes(directory: Path, needed_bytes: int, needed_by: str, remedy: str = "choose another one") -> None:
    """Raise BenchmarkError if the disk of `directory`, which is the option --dir, has fewer bytes free than needed."""
    if (free := shutil.disk_usage(directory).free) < needed_bytes:
        raise BenchmarkError(f"--dir has {free} bytes free and {needed_by} needs {needed_bytes}; {remedy}")


def _git_commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        # RESULTS.md and results/ are left out, because what benchmarks have written is no change of the code.
        code = (".", ":!benchmarks/RESULTS.md", ":!benchmarks/results")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}, with changes" if changed else commit


def _mount_of(directory: Path) -> tuple[str, str]:
    """Return the type of the file system that holds `directory`, and its device with the device's model."""
    number = directory.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        if left.split()[2] == wanted:
            source = right.split()[1]
            name = Path(source).name if source.startswith("/dev/") else "no device of its own"
            return right.split()[0], f"{name} ({model})" if (model := _device_model(wanted)) else name
    return "unknown", "unknown"


def _device_model(number: str) -> str:
    try:
        return (Path("/sys/dev/block") / number / "device" / "model").read_text().strip()
    except OSError:
        return ""


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
