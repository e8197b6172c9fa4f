"""A GPU goes on writing for a moment when its trainer is killed. These tests are skipped on a machine without one.

They print how long after the end of the lock and of the process the last byte changed (`pytest -s`), and assert that
the daemon grants the memory to no other client before. PARAMSERVER_LATE_ROUNDS sets how often, instead of 20 times.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind
from storage.base.syscalls import is_locked_elsewhere
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Clients
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

MIB = 1 << 20
# The elements of the gradient, of four bytes each.
NUMEL = 32 * MIB
ROUNDS = int(os.environ.get("PARAMSERVER_LATE_ROUNDS", "20"))
# Cycles of the kernel before the copies: one to two seconds.
CYCLES = 2_000_000_000
LATE_COPY_SECONDS = 5.0
# For so long after the end of the process the parent watches the range.
WATCH_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Writer:
    """A late_writer process, and the range that its GPU is about to write to."""

    process: subprocess.Popen[str]
    offset: int
    nbytes: int


@contextmanager
def late_writer(daemon: Daemon) -> Iterator[Writer]:
    arguments = [sys.executable, "-m", "tests.gpu.late_writer", daemon.address, "job", str(NUMEL), str(CYCLES)]
    process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        fields = json.loads(process.stdout.readline())
        yield Writer(process, fields["offset"], fields["nbytes"])
    finally:
        process.kill()
        process.communicate()


@contextmanager
def store(directory: Path) -> Iterator[tuple[Daemon, Clients, Layout]]:
    config = {
        "host_budget": "3GiB",
        "nvme_budget": "8GiB",
        "session_grace_seconds": 0.2,
        "late_copy_seconds": LATE_COPY_SECONDS,
    }
    layout = Layout(name="job", numels=(NUMEL,), groups=("a",))
    with Daemon(directory / "state", config) as daemon, Clients(daemon.address) as clients:
        clients.rank(layout, run_id="first").begin().close()
        yield daemon, clients, layout


def watch(clients: Clients, writer: Writer) -> tuple[float, float, float]:
    """Kill the writer, and return when its lock, its process and its last write were gone, as seconds after the kill.

    The range is looked at each millisecond, at the last byte of each of the 64 copies.
    """
    watcher = clients.client(name="watcher")
    arena = watcher.map_arena()
    pidfd = os.pidfd_open(writer.process.pid)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    locked = _file_of(writer.process.pid)
    slots = [offset for offset in range(64, 4096, 16) if is_locked_elsewhere(locked, offset)]
    assert slots, "the writer holds the lock of its slot"
    before = _sample(arena, writer)
    began = time.monotonic()
    writer.process.send_signal(signal.SIGKILL)
    unlocked = gone = last = 0.0
    while not gone or time.monotonic() - began < gone + WATCH_SECONDS:
        now = time.monotonic() - began
        if not unlocked and not any(is_locked_elsewhere(locked, offset) for offset in slots):
            unlocked = now
        if not gone and ended.poll(0):
            gone = now
        if (found := _sample(arena, writer)) != before:
            before, last = found, now
        time.sleep(0.001)
    os.close(pidfd)
    os.close(locked)
    return unlocked, gone, last


def _file_of(pid: int) -> int:
    """Open the arena's file through a process that has it open."""
    directory = Path(f"/proc/{pid}/fd")
    for link in directory.iterdir():
        if "paramserver-arena" in str(link.readlink()):
            return os.open(link, os.O_RDWR)
    raise AssertionError("the process has not mapped the arena")


def _sample(arena: mmap.mmap, writer: Writer) -> bytes:
    part = writer.nbytes // 64
    return bytes(arena[writer.offset + begin + part - 1] for begin in range(0, writer.nbytes - part + 1, part))


def test_how_long_a_gpu_writes_after_the_kill_and_that_the_daemon_waits_for_it(tmp_path: Path) -> None:
    with store(tmp_path) as (daemon, clients, _):
        for number in range(ROUNDS):
            with late_writer(daemon) as writer:
                unlocked, gone, last = watch(clients, writer)
                print(
                    f"round {number}: unlocked {unlocked:.3f} s, ended {gone:.3f} s, last write {last:.3f} s after the "
                    f"kill, which is {max(0.0, last - unlocked):.3f} s after the end of the lock and "
                    f"{max(0.0, last - gone):.3f} s after that of the process"
                )
                assert last < gone + LATE_COPY_SECONDS, "late_copy_seconds is too short for this driver"
            # The watch has lasted longer than the quarantine.
            wait_until(lambda: tiers(daemon.address)[0].quarantined_bytes == 0)


def test_the_range_is_granted_to_nobody_while_the_gpu_may_write(tmp_path: Path) -> None:
    with store(tmp_path) as (daemon, clients, layout), late_writer(daemon) as writer:
        writer.process.kill()
        writer.process.wait()
        wait_until(lambda: tiers(daemon.address)[0].leased_bytes == 0)
        assert tiers(daemon.address)[0].quarantined_bytes >= writer.nbytes
        rank = clients.rank(layout, run_id="second")
        rank.resume()
        lease = rank.acquire("a", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
        mine = range(lease.arena_offset, lease.arena_offset + lease.size_bytes)
        assert mine.stop <= writer.offset or writer.offset + writer.nbytes <= mine.start
        arena = rank.map_arena()
        arena[mine.start : mine.stop] = bytes(len(mine))
        wait_until(lambda: tiers(daemon.address)[0].quarantined_bytes == 0)
        assert not any(arena[mine.start : mine.stop])


def test_a_trainer_that_is_stopped_keeps_what_its_gpu_writes_to(tmp_path: Path) -> None:
    with store(tmp_path) as (daemon, _, _), late_writer(daemon) as writer:
        writer.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: tiers(daemon.address)[0].quarantined_bytes >= writer.nbytes, seconds=60.0)
        time.sleep(2 * LATE_COPY_SECONDS)
        assert tiers(daemon.address)[0].quarantined_bytes >= writer.nbytes, "the lock is held, whatever the time"
        writer.process.send_signal(signal.SIGCONT)
        writer.process.kill()
        writer.process.wait()
        wait_until(lambda: tiers(daemon.address)[0].quarantined_bytes == 0)
