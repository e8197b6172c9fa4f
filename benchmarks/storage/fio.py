"""Runs of fio, to which the NVMe tier is compared, and their results. This module owns fio's command line.

fio does the same as the tier: several threads make blocking requests (psync) that bypass the page cache.
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

# With these, fio is as fast as it can be. With buffers scattered over small pages, large requests have so many segments
# that devices were seen to read at less than half their speed. fio only aligns its buffers, so glibc has to ask the
# kernel for huge pages.
HUGE_PAGE_BUFFERS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
HUGE_PAGE_ALIGNMENT = "--iomem_align=2m"
HOW_TO_INSTALL = "install it with `apt install fio`, `dnf install fio` or `brew install fio`"


@dataclass(frozen=True, slots=True, kw_only=True)
class FioJob:
    """A job of fio: `threads` threads together move `nbytes`, in requests whose sizes are drawn from `block_sizes`.

    Each thread has its own part of `file`, and all block sizes have equal weight. If `file_bytes` is less than
    `nbytes`, the threads go over the file again.
    """

    mode: FioMode
    file: Path
    nbytes: int
    threads: int
    block_sizes: tuple[int, ...]
    file_bytes: int | None = None

    def arguments(self) -> list[str]:
        """Return the job's arguments on fio's command line."""
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
            # Blocks of mixed sizes do not tile the file. So fio must not keep a map of visited blocks, and may visit
            # some twice.
            *(["--norandommap"] if len(self.block_sizes) > 1 else []),
            f"--size={part}",
            f"--io_size={moved}",
            f"--offset_increment={part}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fio:
    """An installed fio, which runs in `directory`; `direct` tells whether its file system supports O_DIRECT."""

    executable: str
    directory: Path
    direct: bool = True

    @property
    def version(self) -> str:
        """The version as fio prints it."""
        return subprocess.run([self.executable, "--version"], check=True, capture_output=True, text=True).stdout.strip()

    def run(self, *jobs: FioJob) -> Sample:
        """Run the jobs at the same time, and return all their bytes in the time of the slowest job.

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
    """Return the fio on the PATH, to be run in `directory`, or None if it is not installed."""
    executable = shutil.which("fio")
    return Fio(executable=executable, directory=directory, direct=direct) if executable else None


def _sample(groups: Sequence[dict[str, Any]]) -> Sample:
    sides = [group[side] for group in groups for side in ("read", "write")]
    return Sample(
        nbytes=sum(side["io_bytes"] for side in sides),
        # `runtime` is in whole milliseconds, so it may be 0.
        seconds=max(1, *(side["runtime"] for side in sides)) / 1e3,
        # `usr_cpu` and `sys_cpu` are per cent of `job_runtime`, the summed run time of the group's threads in ms.
        cpu_seconds=sum((g["usr_cpu"] + g["sys_cpu"]) / 100 * g["job_runtime"] / 1e3 for g in groups),
    )


def _equal_percents(count: int) -> list[int]:
    """Return `count` whole numbers that add up to 100 and differ by at most 1."""
    return [100 * (i + 1) // count - 100 * i // count for i in range(count)]
