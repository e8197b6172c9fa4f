"""Runs fio, the yardstick, and reads what it says. Owns fio's command line.

fio does what the tier does: blocking requests (psync) of a number of threads, past the page cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.common.measure import BenchmarkError, Sample
from storage.tiers.base import round_up

FioMode = Literal["read", "write", "randread", "randwrite"]

# The best that fio can do: with buffers scattered over small pages, large requests have so many segments that devices
# were seen to read at less than half their speed. glibc asks for huge pages where it is told to, fio only aligns.
HUGE_PAGE_BUFFERS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
HUGE_PAGE_ALIGNMENT = "--iomem_align=2m"
HOW_TO_INSTALL = "install it with `apt install fio`, `dnf install fio` or `brew install fio`"


@dataclass(frozen=True, slots=True, kw_only=True)
class FioJob:
    """`threads` threads that move `nbytes` between them, in requests of `block_sizes` bytes drawn with equal weight.

    Each thread has its own part of `file`. Where `file_bytes` is less than `nbytes` they go over it again.
    """

    mode: FioMode
    file: Path
    nbytes: int
    threads: int
    block_sizes: tuple[int, ...]
    file_bytes: int | None = None

    def arguments(self) -> list[str]:
        """The job on fio's command line."""
        block = max(self.block_sizes)
        part, moved = (round_up(-(-n // self.threads), block) for n in (self.file_bytes or self.nbytes, self.nbytes))
        percents = _equal_percents(len(self.block_sizes))
        split = ":".join(f"{size}/{percent}" for size, percent in zip(self.block_sizes, percents, strict=True))
        return [
            f"--name={self.mode}",
            "--new_group",
            f"--filename={self.file}",
            f"--rw={self.mode}",
            f"--numjobs={self.threads}",
            *([f"--bs={block}"] if len(self.block_sizes) == 1 else [f"--bssplit={split}"]),
            # Mixed sizes do not tile the file: then blocks are drawn, not dealt.
            *(["--norandommap"] if len(self.block_sizes) > 1 else []),
            f"--size={part}",
            f"--io_size={moved}",
            f"--offset_increment={part}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fio:
    """An fio that is installed; `direct`: whether the file system knows O_DIRECT."""

    executable: str
    directory: Path
    direct: bool = True

    @property
    def version(self) -> str:
        """As fio prints it."""
        return subprocess.run([self.executable, "--version"], check=True, capture_output=True, text=True).stdout.strip()

    def run(self, *jobs: FioJob) -> Sample:
        """Runs the jobs at the same time; all their bytes, in the time that the slowest one took.

        Raises:
            BenchmarkError: fio failed.
        """
        output = self.directory / "fio.json"
        command = [
            self.executable,
            *("--output-format=json", f"--output={output}"),
            "--name=global",
            f"--direct={int(self.direct)}",
            *("--ioengine=psync", "--thread", "--group_reporting", "--randrepeat=0", HUGE_PAGE_ALIGNMENT),
            *(argument for job in jobs for argument in job.arguments()),
        ]
        environment = os.environ | HUGE_PAGE_BUFFERS
        result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if result.returncode:
            raise BenchmarkError(f"fio failed ({result.returncode}): {result.stderr.strip()[-2000:]}")
        return _sample(json.loads(output.read_text())["jobs"])


def find(directory: Path, *, direct: bool) -> Fio | None:
    """The fio on the PATH, to be run in `directory`; None where there is none."""
    executable = shutil.which("fio")
    return Fio(executable=executable, directory=directory, direct=direct) if executable else None


def _sample(groups: Sequence[dict[str, Any]]) -> Sample:
    sides = [group[side] for group in groups for side in ("read", "write")]
    return Sample(
        nbytes=sum(side["io_bytes"] for side in sides),
        # In whole milliseconds.
        seconds=max(1, *(side["runtime"] for side in sides)) / 1e3,
        # Per cent of the time that the group's threads ran, added up.
        cpu_seconds=sum((g["usr_cpu"] + g["sys_cpu"]) / 100 * g["job_runtime"] / 1e3 for g in groups),
    )


def _equal_percents(count: int) -> list[int]:
    """Whole numbers that add up to 100, as equal as can be."""
    return [100 * (i + 1) // count - 100 * i // count for i in range(count)]
