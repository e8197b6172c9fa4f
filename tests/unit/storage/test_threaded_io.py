"""The I/O engine on a real file: neighbours move together, urgent requests first, and no buffer is left in use."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from storage.base import syscalls
from storage.base.errors import DataLossError, DeviceError
from storage.tiers import threaded_io
from storage.tiers.base import PAGE_BYTES
from storage.tiers.io_engine import IoRequest, Priority
from storage.tiers.threaded_io import ThreadedIo

PAGES = 64


class Gate:
    """A replacement of one function of syscalls that records its calls, and can make them wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str = "read_exact") -> None:
        self.calls: list[tuple[int, int]] = []
        self.bad_offsets: set[int] = set()
        self._open = threading.Event()
        self._real = getattr(syscalls, function)
        self._open.set()
        monkeypatch.setattr(syscalls, function, self._call)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def reached(self, calls: int) -> None:
        """Wait until there were `calls` calls."""
        while len(self.calls) < calls:
            await asyncio.sleep(0.001)

    def _call(self, fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        self.calls.append((offset // PAGE_BYTES, sum(map(len, buffers)) // PAGE_BYTES))
        assert self._open.wait(20)
        if any(offset <= bad < offset + sum(map(len, buffers)) for bad in self.bad_offsets):
            raise DeviceError("input/output error")
        self._real(fd, buffers, offset, path)


@asynccontextmanager
async def io_on(path: Path, contents: bytes, *, threads: int = 1) -> AsyncIterator[ThreadedIo]:
    path.write_bytes(contents)
    io = ThreadedIo(os.open(path, os.O_RDWR), path, read_threads=threads, write_threads=threads)
    try:
        yield io
    finally:
        await io.close()


def contents() -> bytes:
    return random.Random(1).randbytes(PAGES * PAGE_BYTES)


def request(page: int, pages: int = 1) -> IoRequest:
    return IoRequest(page * PAGE_BYTES, memoryview(mmap.mmap(-1, pages * PAGE_BYTES)))


def expected(of: IoRequest) -> bytes:
    return contents()[of.offset : of.offset + len(of.buffer)]


async def test_neighbours_that_wait_together_become_one_call_in_whatever_order_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with io_on(tmp_path / "data", contents()) as io:
        requests = [request(page) for page in range(PAGES) if page not in (20, 40)]
        random.Random(2).shuffle(requests)
        await io.read(requests, Priority.DEMAND)
        assert sorted(gate.calls) == [(0, 20), (21, 19), (41, 23)]
        assert all(r.buffer == expected(r) for r in requests)


async def test_neighbours_of_several_callers_move_together_and_end_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with io_on(tmp_path / "data", contents()) as io:
        gate.close()
        first = asyncio.ensure_future(io.read([request(60)], Priority.DEMAND))
        await gate.reached(1)
        callers = [asyncio.ensure_future(io.read([r], Priority.UPDATE)) for r in map(request, (3, 2, 5, 4))]
        other = asyncio.ensure_future(io.read([request(6)], Priority.PREFETCH))
        await asyncio.sleep(0.01)
        gate.open()
        await asyncio.gather(first, *callers, other)
        assert gate.calls == [(60, 1), (6, 1), (2, 4)], "not with those of another priority"


async def test_a_call_is_never_longer_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_io, "COALESCED_BYTES", 10 * PAGE_BYTES)
    gate = Gate(monkeypatch)
    async with io_on(tmp_path / "data", contents()) as io:
        await io.read([request(page, 4) for page in range(0, 32, 4)], Priority.DEMAND)
        assert max(pages for _, pages in gate.calls) == 8
        assert sum(pages for _, pages in gate.calls) == 32


async def test_the_urgent_overtake_those_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    async with io_on(tmp_path / "data", contents()) as io:
        gate.close()
        first = asyncio.ensure_future(io.read([request(0)], Priority.SCRUB))
        await gate.reached(1)
        orders = [
            (10, Priority.SCRUB),
            (20, Priority.UPDATE),
            (30, Priority.PREFETCH),
            (40, Priority.DEMAND),
        ]
        tasks = [asyncio.ensure_future(io.read([request(order[0])], order[1])) for order in orders]
        await asyncio.sleep(0.01)
        assert io.load.queued == 5 and io.load.bytes_in_flight == PAGE_BYTES
        gate.open()
        await asyncio.gather(first, *tasks)
        assert [page for page, _ in gate.calls] == [0, 40, 30, 20, 10]


async def test_a_cancelled_call_drops_what_waits_and_lets_go_of_buffers_when_the_device_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with io_on(tmp_path / "data", contents()) as io:
        gate.close()
        requests = [request(page) for page in (0, 10, 20, 30)]
        task = asyncio.ensure_future(io.read(requests, Priority.DEMAND))
        await gate.reached(1)
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done(), "the device still writes to a buffer"
        assert io.load.queued == 1
        gate.open()
        await asyncio.wait([task])
        assert task.cancelled() and len(gate.calls) == 1 and io.load.queued == 0
        waiting = request(50)
        await io.read([waiting], Priority.DEMAND)
        assert waiting.buffer == expected(waiting)


async def test_the_error_of_one_request_does_not_reach_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.bad_offsets = {5 * PAGE_BYTES}
    async with io_on(tmp_path / "data", contents()) as io:
        gate.close()
        blocker = asyncio.ensure_future(io.read([request(60)], Priority.DEMAND))
        await gate.reached(1)
        requests = [request(page) for page in range(10)]
        tasks = [asyncio.ensure_future(io.read([r], Priority.DEMAND)) for r in requests]
        await asyncio.sleep(0.01)
        gate.open()
        results = await asyncio.gather(blocker, *tasks, return_exceptions=True)
        assert [type(result) for result in results[1:]] == [
            DeviceError if page == 5 else type(None) for page in range(10)
        ]
        assert all(r.buffer == expected(r) for page, r in enumerate(requests) if page != 5)


async def test_wrong_bytes_are_read_once_more_before_they_count(tmp_path: Path) -> None:
    async with io_on(tmp_path / "data", contents()) as io:
        for failures, ends_well in ((1, True), (2, False)):
            checked: list[int] = []

            def check(seen: list[int] = checked, wrong: int = failures) -> None:
                seen.append(1)
                if len(seen) <= wrong:
                    raise DataLossError("wrong bytes")

            one = request(3)
            one.check = check
            if ends_well:
                await io.read([one], Priority.DEMAND)
            else:
                with pytest.raises(DataLossError, match="wrong bytes"):
                    await io.read([one], Priority.DEMAND)
            assert len(checked) == 2


async def test_a_check_that_fails_before_a_write_fails_the_write_and_nothing_else(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("these are no whole blocks")

    async with io_on(tmp_path / "data", contents()) as io:
        bad, good, other = request(3), request(4), request(9)
        bad.check = fail
        with pytest.raises(ValueError, match="no whole blocks"):
            await io.write([good, bad], Priority.UPDATE)
        assert io.load.queued == 0
        other.buffer[:] = b"x" * PAGE_BYTES
        await io.write([other], Priority.UPDATE)
    data = (tmp_path / "data").read_bytes()
    assert data[3 * PAGE_BYTES : 4 * PAGE_BYTES] == expected(bad)
    assert data[9 * PAGE_BYTES : 10 * PAGE_BYTES] == other.buffer


async def test_writes_that_are_cancelled_leave_nothing_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "write_exact")
    async with io_on(tmp_path / "data", contents()) as io:
        gate.close()
        task = asyncio.ensure_future(io.write([request(page) for page in range(0, PAGES, 2)], Priority.UPDATE))
        await gate.reached(1)
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done() and io.load.queued == 1
        gate.open()
        await asyncio.wait([task])
        assert task.cancelled() and io.load.queued == 0 and len(gate.calls) == 1


async def test_reads_and_writes_of_many_callers_agree_with_a_file_in_memory(tmp_path: Path) -> None:
    rng, model = random.Random(3), bytearray(contents())
    async with io_on(tmp_path / "data", bytes(model), threads=3) as io:
        for _ in range(50):
            pages = rng.sample(range(PAGES), 24)
            writes, reads = [request(page) for page in pages[:12]], [request(page) for page in pages[12:]]
            for write in writes:
                write.buffer[:] = rng.randbytes(PAGE_BYTES)
            halves = [writes[:5], writes[5:]]
            await asyncio.gather(
                *(io.write(half, Priority.UPDATE) for half in halves),
                *(io.read([read], rng.choice(list(Priority))) for read in reads),
            )
            for write in writes:
                model[write.offset : write.offset + PAGE_BYTES] = write.buffer
            assert all(read.buffer == model[read.offset : read.offset + PAGE_BYTES] for read in reads)
        await io.sync()
        assert io.load.queued == 0 and io.load.bytes_in_flight == 0
        assert io.load.bytes_moved == 50 * 24 * PAGE_BYTES
    assert (tmp_path / "data").read_bytes() == model


async def test_the_time_of_a_move_that_is_under_way_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves that overlap for a long time would otherwise give a device all of their bytes and none of their time."""
    gate = Gate(monkeypatch)
    async with io_on(tmp_path / "data", contents()) as io:
        gate.close()
        moving = asyncio.ensure_future(io.read([request(0)], Priority.DEMAND))
        await gate.reached(1)
        first, second = io.load, io.load
        gate.open()
        await moving
        assert 0 < first.busy_seconds < second.busy_seconds < io.load.busy_seconds
        assert io.load.busy_seconds == io.load.busy_seconds, "nothing is under way"


async def test_bytes_that_are_wrong_while_the_engine_closes_are_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, gate = 0, Gate(monkeypatch)

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 1:
            time.sleep(0.2)  # The worker that has moved the bytes looks for further work meanwhile.
            raise DataLossError("wrong bytes")

    async with io_on(tmp_path / "data", contents()) as io:
        gate.close()
        read = IoRequest(0, memoryview(mmap.mmap(-1, PAGE_BYTES)), check)
        reading = asyncio.ensure_future(io.read([read], Priority.DEMAND))
        await gate.reached(1)
        asyncio.get_running_loop().call_later(0.2, gate.open)
    async with asyncio.timeout(20):
        await reading
    assert checks == 2
    assert read.buffer == expected(read)
