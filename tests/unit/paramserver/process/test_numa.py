"""`numa_node` is honoured for threads and memory, or refused with the reason."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.errors import ConfigError
from paramserver.process import numa

ROOT = Path(__file__).parents[3]
# A program that binds itself to node 0, and then prints the cores and the memory policy of a thread that it starts. It
# needs a process of its own, because the binding cannot be undone.
STAYS = """
import mmap, os, threading
from paramserver.process import numa
numa.stay_on(0)
def look():
    memory = mmap.mmap(-1, 1 << 20)
    memory[0] = 1
    policies = {line.split()[1] for line in open("/proc/thread-self/numa_maps") if "anon=" in line}
    print(sorted(os.sched_getaffinity(0)), policies)
thread = threading.Thread(target=look)
thread.start()
thread.join()
"""


def nodes() -> list[Path]:
    return list(Path("/sys/devices/system/node").glob("node[0-9]*"))


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists() or not nodes(), reason="a kernel without NUMA")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="not known how to ask for memory")
def test_threads_and_memory_are_on_the_node() -> None:
    run = subprocess.run([sys.executable, "-c", STAYS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    cores = numa.parse_cores((nodes()[0].parent / "node0" / "cpulist").read_text()) & os.sched_getaffinity(0)
    # Where a sandbox forbids the system call for memory, the program logs that.
    assert str(sorted(cores)) in run.stdout
    assert "prefer" in run.stdout or "set_mempolicy" in run.stderr


def test_a_node_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in (0, 3):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    with pytest.raises(ConfigError, match=r"numa_node = 7: there is no such node; there are: 0, 3$"):
        numa.stay_on(7)


def test_a_node_whose_cores_the_process_may_not_use_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("100000-100003\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    with pytest.raises(ConfigError, match="numa_node = 1: none of its cores is among those"):
        numa.stay_on(1)


@pytest.mark.parametrize(
    ("listed", "cores"), [("0-1\n", {0, 1}), ("0-2,8,10-11\n", {0, 1, 2, 8, 10, 11}), ("5", {5}), ("\n", set())]
)
def test_lists_of_cores(listed: str, cores: set[int]) -> None:
    assert numa.parse_cores(listed) == cores
