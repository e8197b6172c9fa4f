"""The memory limit of benchmarks ends what exceeds it, and leaves no group behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.measure import BenchmarkError
from benchmarks.common.memory_limit import MemoryLimit

MIB = 1 << 20
# Writes as many MiB as its argument says.
PROGRAM = "import sys; data = bytearray(int(sys.argv[1]) << 20); print(len(data))"


def groups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob("**/paramserver-*"))


@pytest.fixture
def limit() -> MemoryLimit:
    """A limit of 64 MiB, where this process may set one."""
    limit = MemoryLimit(64 * MIB)
    try:
        with limit:
            pass
    except BenchmarkError as error:
        pytest.skip(str(error))
    return limit


def test_a_process_that_exceeds_the_limit_is_killed_and_counted(limit: MemoryLimit) -> None:
    before = groups()
    with limit:
        for mebibytes, status in ((16, 0), (128, -signal.SIGKILL)):
            command = limit.command([sys.executable, "-c", PROGRAM, str(mebibytes)])
            assert subprocess.run(command, check=False, capture_output=True).returncode == status
        assert limit.kills == 1
    assert groups() == before


def test_processes_that_are_left_are_ended_with_the_limit(limit: MemoryLimit) -> None:
    before = groups()
    with limit:
        process = subprocess.Popen(limit.command(["sleep", "600"]))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
    assert process.wait(10) == -signal.SIGKILL
    assert groups() == before
