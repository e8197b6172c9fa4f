"""Says what a result was measured on: hardware, kernel, file system and software. Never names the host or a path."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def describe(directory: Path) -> dict[str, Any]:
    """The machine as seen from `directory`: CPU, memory (bytes), kernel, file system type and device."""
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
    """When, and of what: date (UTC), git commit (null outside a checkout), versions."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _git_commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        # What a benchmark itself writes does not make the code another one.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/RESULTS.md")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}, with changes" if changed else commit


def _mount_of(directory: Path) -> tuple[str, str]:
    """Type of the file system that holds `directory`, and what it is on."""
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
