"""Ranges are held back as long as the client's process, or its device, may write to them, and not longer."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from paramserver.sessions.client_process import ClientProcesses
from paramserver.sessions.quarantine import Held, Quarantine
from storage.memory.host_cache import EvictionOrder
from storage.tiers.arena import ArenaRange
from storage.tiers.base import PAGE_BYTES
from storage.tiers.host import HostTier
from storage.tiers.slots import ArenaSlot

MIB = 1 << 20
SECONDS = 0.3

# A process that holds the lock of a byte of the descriptor that it inherits, releases it at the first line of its
# standard input, and ends at the second one.
HOLDER = """
import fcntl, sys
fd, offset = int(sys.argv[1]), int(sys.argv[2])
fcntl.lockf(fd, fcntl.LOCK_EX, 1, offset)
print("locked", flush=True)
sys.stdin.readline()
fcntl.lockf(fd, fcntl.LOCK_UN, 1, offset)
print("unlocked", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True, slots=True)
class Client:
    """A process with a slot, and a range that it may write to."""

    process: subprocess.Popen[str]
    slot: ArenaSlot
    range: ArenaRange

    def unlock(self) -> None:
        """Have the process release its lock, as the kernel does when it ends a process, while the process lives on."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "unlocked\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def host() -> Iterator[HostTier]:
    host = HostTier(4 * MIB, EvictionOrder(), lambda: None, slots=8)
    yield host
    host.arena.close()


@contextmanager
def client_of(host: HostTier) -> Iterator[Client]:
    slot, range_ = host.arena.slots.take(), host.arena.allocate(PAGE_BYTES)
    assert slot is not None and range_ is not None
    arguments = [sys.executable, "-S", "-c", HOLDER, str(host.arena.fd), str(slot.offset)]
    process = subprocess.Popen(
        arguments, pass_fds=[host.arena.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield Client(process, slot, range_)
    finally:
        process.kill()
        process.communicate()


def leave(host: HostTier, slot: ArenaSlot) -> None:
    """Write the word of a client that has waited for its device."""
    os.pwrite(host.arena.fd, struct.pack("<Q", slot.generation), slot.offset + 8)


async def until_free(quarantine: Quarantine) -> float:
    """Wait until nothing is held back, and return the event loop's time."""
    async with asyncio.timeout(20):
        while quarantine.nbytes:
            await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time()


async def stays(quarantine: Quarantine, client: Client) -> bool:
    """Return whether the client's range is held back for longer than the quarantine takes to look and to wait."""
    await asyncio.sleep(2 * SECONDS)
    return list(quarantine.ranges) == [client.range]


def test_the_process_of_a_slot_is_the_one_that_holds_its_lock(host: HostTier) -> None:
    processes = ClientProcesses(host.arena.slots)
    with client_of(host) as client:
        assert host.arena.slots.holder(client.slot) == client.process.pid
        known = processes.holder(client.slot)
        assert known is not None and not known.has_ended() and processes.count == 1
        client.process.send_signal(signal.SIGSTOP)
        assert not known.has_ended()
        client.kill()
        assert known.has_ended() and host.arena.slots.holder(client.slot) is None
        assert processes.holder(client.slot) is None
        known.close()
        assert processes.count == 0


def test_no_more_pidfds_are_open_than_are_kept_free_for_them(host: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.sessions.client_process.MOST_PROCESSES", 1)
    processes = ClientProcesses(host.arena.slots)
    with client_of(host) as first, client_of(host) as second:
        known = processes.holder(first.slot)
        assert known is not None and processes.holder(second.slot) is None
        known.close()
        again = processes.holder(second.slot)
        assert again is not None
        again.close()


async def test_a_range_is_held_until_the_lock_is_gone_and_the_process_and_the_time(host: HostTier) -> None:
    quarantine, loop = Quarantine(host, SECONDS), asyncio.get_running_loop()
    used = host.arena.used_bytes
    with client_of(host) as client:
        process = ClientProcesses(host.arena.slots).holder(client.slot)
        quarantine.hold(Held(client.slot, [client.range], registers_arena=True, process=process))
        assert quarantine.nbytes == PAGE_BYTES
        assert await stays(quarantine, client), "the lock is held"
        client.unlock()
        assert await stays(quarantine, client), "the process lives, and may have a device that writes"
        client.kill()
        ended = loop.time()
        assert await until_free(quarantine) - ended >= SECONDS
    assert host.arena.used_bytes == used


async def test_a_process_that_is_stopped_keeps_its_lock(host: HostTier) -> None:
    quarantine = Quarantine(host, 0.0)
    with client_of(host) as client:
        process = ClientProcesses(host.arena.slots).holder(client.slot)
        client.process.send_signal(signal.SIGSTOP)
        quarantine.hold(Held(client.slot, [client.range], registers_arena=True, process=process))
        assert await stays(quarantine, client)
        client.kill()
        await until_free(quarantine)


async def test_a_process_that_cannot_be_watched_counts_by_the_time_from_the_end_of_its_lock(host: HostTier) -> None:
    quarantine, loop = Quarantine(host, SECONDS), asyncio.get_running_loop()
    with client_of(host) as client:
        quarantine.hold(Held(client.slot, [client.range], registers_arena=True))
        assert await stays(quarantine, client)
        unlocked = loop.time()
        client.unlock()
        assert await until_free(quarantine) - unlocked >= SECONDS


@pytest.mark.parametrize("registers_arena", [False, True])
async def test_a_client_whose_device_writes_no_more_counts_by_its_lock_alone(
    host: HostTier, registers_arena: bool
) -> None:
    quarantine = Quarantine(host, 600.0)
    with client_of(host) as client:
        process = ClientProcesses(host.arena.slots).holder(client.slot)
        quarantine.hold(Held(client.slot, [client.range], registers_arena, process))
        if registers_arena:
            leave(host, client.slot)
        assert await stays(quarantine, client)
        client.unlock()
        await until_free(quarantine)


async def test_a_slot_is_taken_anew_without_the_words_of_its_former_client(host: HostTier) -> None:
    slots = host.arena.slots
    taken = [slots.take() for _ in range(8)]
    slot = taken[3]
    assert slot is not None and slots.take() is None and not slots.has_left(slot)
    leave(host, slot)
    assert slots.has_left(slot)
    slots.free(slot)
    again = slots.take()
    assert again is not None and again.offset == slot.offset and not slots.has_left(again)


async def test_the_end_of_the_daemon_closes_what_the_quarantine_watches(host: HostTier) -> None:
    quarantine, processes = Quarantine(host, 600.0), ClientProcesses(host.arena.slots)
    with client_of(host) as client:
        quarantine.hold(Held(client.slot, [client.range], True, processes.holder(client.slot)))
        assert processes.count == 1
        quarantine.close()
        assert processes.count == 0
