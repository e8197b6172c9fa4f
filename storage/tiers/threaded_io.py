"""An I/O engine of worker threads and plain vectored system calls.

Reads and writes have a lane each: a priority queue with its worker threads. Waiting requests that are neighbours in the
file become one system call, so that many small shards cost as little as one large one. Checks of checksums run on a
thread of their own, so that the device does not wait for them. This module owns the file's descriptor and the threads.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from storage.base import syscalls
from storage.base.errors import DataLossError
from storage.base.threads import begin_work
from storage.base.waiting import wait_out
from storage.tiers.base import BusyClock
from storage.tiers.io_engine import IoLoad, IoRequest, Priority

ArgumentT = TypeVar("ArgumentT")

# The most bytes that one system call reads or writes: enough for the device's full speed, and so few that several
# workers share a large slab.
COALESCED_BYTES = 4 << 20
# The most buffers of one system call. The kernel accepts at most 1024 (IOV_MAX).
COALESCED_BUFFERS = 512
# The thread that computes checksums before writes pauses while this many checked bytes wait for the writing threads.
# That is enough to keep all of them busy, and so few that the bytes are still in the processor's cache when they are
# written.
LEAD_BYTES = 8 << 20


class ThreadedIo:
    """An I/O engine of threads; see IoEngine for the contract."""

    def __init__(self, fd: int, path: Path, *, read_threads: int, write_threads: int, nice: int = 0) -> None:
        """Take over the descriptor `fd` of the file at `path`, and start threads with the niceness `nice`."""
        self._fd = fd
        self._path = path
        self._reads = _Lane(f"{path.name}-read", read_threads, self._read, nice)
        self._writes = _Lane(f"{path.name}-write", write_threads, self._write, nice)
        self._syncs = ThreadPoolExecutor(1, f"{path.name}-sync")
        self._sync_began: float | None = None

    async def read(self, requests: Sequence[IoRequest], priority: Priority) -> None:
        """Fill the buffers of all requests from the file; see `IoEngine.read`."""
        await self._reads.run(requests, priority, check_first=False)

    async def write(self, requests: Sequence[IoRequest], priority: Priority) -> None:
        """Write the buffers of all requests to the file; see `IoEngine.write`."""
        await self._writes.run(requests, priority, check_first=True)

    async def sync(self) -> None:
        """Wait until all earlier writes are on the device; see `IoEngine.sync`."""
        # The sync is shielded from cancellation, because the tier must learn whether the writes are durable.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._syncs, self._sync))

    @property
    def load(self) -> IoLoad:
        """The counters of this engine at this moment; see `IoEngine.load`."""
        lanes = (self._reads, self._writes)
        began = [began for lane in lanes for began in lane.began()]
        began += [self._sync_began] if self._sync_began is not None else []
        return IoLoad(
            queued=sum(lane.depth for lane in lanes),
            bytes_in_flight=sum(lane.bytes_in_flight for lane in lanes),
            bytes_moved=sum(lane.bytes_moved for lane in lanes),
            busy_seconds=sum(lane.busy_seconds for lane in lanes),
            stalled_seconds=time.monotonic() - min(began) if began else 0.0,
        )

    async def close(self) -> None:
        """Finish all requests, end the threads and close the file; see `IoEngine.close`."""
        await asyncio.to_thread(self._reads.close)
        await asyncio.to_thread(self._writes.close)
        await asyncio.to_thread(self._syncs.shutdown)
        os.close(self._fd)

    def _read(self, requests: Sequence[IoRequest]) -> None:
        syscalls.read_exact(self._fd, [r.buffer for r in requests], requests[0].offset, self._path)

    def _write(self, requests: Sequence[IoRequest]) -> None:
        syscalls.write_exact(self._fd, [r.buffer for r in requests], requests[0].offset, self._path)

    def _sync(self) -> None:
        self._sync_began = time.monotonic()
        try:
            syscalls.sync_data(self._fd, self._path)
        finally:
            self._sync_began = None


@dataclass(slots=True, eq=False)
class _Batch:
    """The requests of one call of `read` or `write`, which returns when all are done. The lane's lock guards it."""

    # The event loop resolves this future when no request of the batch is in use any more.
    done: asyncio.Future[None]
    # The number of the batch's requests that are not finished or dropped yet.
    left: int = 0
    items: list[_Queued] = field(default_factory=list)
    # The first error of a request of the batch. The requests that had not begun by then are dropped.
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Queued:
    """A request in a lane, from the call of `read` or `write` until it is finished or dropped.

    Attributes:
        checked: no check follows the move, because the request has none or is checked before it is admitted.
        admitted: it waits in the queue, and a worker may take it.
        taken: a worker has taken it, or it was dropped.
        read_again: its bytes were wrong once, and are read for the second time.
    """

    request: IoRequest
    priority: Priority
    batch: _Batch
    checked: bool
    admitted: bool = False
    taken: bool = False
    read_again: bool = False

    def check(self) -> None:
        """Call the request's `check` (see IoRequest), which verifies or records checksums, if it has one."""
        if self.request.check is not None:
            self.request.check()

    @property
    def nbytes(self) -> int:
        return len(self.request.buffer)

    @property
    def start(self) -> int:
        return self.request.offset

    @property
    def end(self) -> int:
        return self.request.offset + len(self.request.buffer)


class _Checker:
    """The thread that runs a lane's checks, because a worker thread that runs them could not keep the device busy.

    One thread suffices, because checks run at the speed of memory.
    """

    def __init__(self, name: str, nice: int) -> None:
        self._nice = nice
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work`, which checks requests, on the thread, after all work that was submitted before."""
        self._queue.put(work)

    def close(self) -> None:
        """Wait until all submitted work is done, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        begin_work(self._nice)
        while work := self._queue.get():
            work()


class _Lane:
    """Worker threads that move the bytes of requests by priority, and neighbours in the file with one system call."""

    def __init__(self, name: str, threads: int, move: Callable[[Sequence[IoRequest]], None], nice: int) -> None:
        """Start the threads. `move` is the system call, which moves the bytes of requests that touch in the file."""
        self._move = move
        self._nice = nice
        self._checker = _Checker(f"{name}-check", nice)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        # The condition is notified when a request has left the queue, so that fewer bytes wait. The checker waits for
        # it.
        self._taken = threading.Condition(self._lock)
        # The bytes of all requests that wait for a worker.
        self._waiting_bytes = 0
        self._sequence = itertools.count()
        # The waiting requests, as a heap of (priority, sequence, request). A request that was dropped, or that a worker
        # moved together with its neighbour in the file, stays in the heap until it is popped.
        self._queue: list[tuple[int, int, _Queued]] = []
        # The waiting requests by their first byte in the file, and by the byte after their last one, so that a worker
        # finds neighbours and moves them in one system call.
        self._by_start: dict[tuple[Priority, int], _Queued] = {}
        self._by_end: dict[tuple[Priority, int], _Queued] = {}
        # Batches that are done and whose futures the event loop has not resolved yet.
        self._finished: list[_Batch] = []
        self._closing = False
        # The time at which each worker began its present read or write, by the worker's number, on the monotonic clock.
        self._began: dict[int, float] = {}
        # The number of requests that are not finished yet.
        self.depth = 0
        self.bytes_in_flight = 0
        self.bytes_moved = 0
        self._busy = BusyClock()
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"{name}-{worker}", daemon=True)
            for worker in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, requests: Sequence[IoRequest], priority: Priority, *, check_first: bool) -> None:
        """Move the bytes of all requests, and check each before (`check_first`, for writes) or after its move.

        See IoEngine.read for errors and cancellation.
        """
        if not requests:
            return
        batch = _Batch(self._loop.create_future(), len(requests))
        batch.items = [_Queued(r, priority, batch, checked=check_first or r.check is None) for r in requests]
        with self._lock:
            self.depth += len(requests)
        if check_first and any(request.check for request in requests):
            self._checker.submit(functools.partial(self._check_and_admit, list(batch.items)))
        else:
            self._admit(batch.items)
        try:
            await asyncio.shield(batch.done)
        except asyncio.CancelledError:
            with self._lock:
                if batch.left:
                    self._drop_rest(batch)
                    if batch.left == 0:
                        self._report(batch)
            try:
                await wait_out([batch.done])
            finally:
                batch.done.exception()
            raise

    @property
    def busy_seconds(self) -> float:
        """The time, up to now, in which at least one move was at the device."""
        with self._lock:
            return self._busy.elapsed

    def began(self) -> list[float]:
        """Return the begin of each move that is at the device now, on the monotonic clock."""
        with self._lock:
            return list(self._began.values())

    def close(self) -> None:
        """End the threads once all requests are finished, those included whose bytes are checked or read once more."""
        with self._lock:
            self._closing = True
            self._wanted.notify_all()
        for thread in self._threads:
            thread.join()
        self._checker.close()

    def _admit(self, items: Sequence[_Queued]) -> None:
        """Put requests into the queue from which the workers take them."""
        with self._lock:
            for item in items:
                # Leave out a request that was dropped while it was being checked.
                if item.taken:
                    continue
                item.admitted = True
                self._waiting_bytes += item.nbytes
                heapq.heappush(self._queue, (item.priority, next(self._sequence), item))
                self._by_start[item.priority, item.start] = item
                self._by_end[item.priority, item.end] = item
            self._wanted.notify(min(len(items), len(self._threads)))

    def _check_and_admit(self, items: Sequence[_Queued]) -> None:
        """Check requests that are to be written, and admit them. This runs on the checker's thread.

        Requests are admitted as soon as there are enough for one system call, so that the device does not wait. The
        checker is at most LEAD_BYTES ahead of the device, so that the bytes are still in the processor's cache when
        they are written.
        """
        checked: list[_Queued] = []
        nbytes = 0
        for item in items:
            # Leave out a request that was dropped while it waited for its check.
            if item.taken:
                continue
            if (error := _error_of(_Queued.check, item)) is not None:
                with self._lock:
                    self._end(item, error)
                continue
            checked.append(item)
            nbytes += item.nbytes
            if nbytes >= COALESCED_BYTES:
                self._admit(checked)
                checked, nbytes = [], 0
                with self._lock:
                    while self._waiting_bytes >= LEAD_BYTES:
                        self._taken.wait()
        self._admit(checked)

    def _check_and_finish(self, run: Sequence[_Queued]) -> None:
        """Check requests that were read, and finish them. This runs on the checker's thread.

        A request whose bytes are wrong is read once more, because the error may not be on the device.
        """
        errors = [_error_of(_Queued.check, item) for item in run]
        again: list[_Queued] = []
        with self._lock:
            for item, error in zip(run, errors, strict=True):
                if isinstance(error, DataLossError) and not item.read_again:
                    item.read_again, item.taken = True, False
                    again.append(item)
                else:
                    self._finish(item, error)
        self._admit(again)

    def _work(self, worker: int) -> None:
        begin_work(self._nice)
        while run := self._next_run(worker):
            errors = self._move_run(run)
            nbytes = sum(item.nbytes for item in run)
            unchecked = [item for item, error in zip(run, errors, strict=True) if error is None and not item.checked]
            with self._lock:
                del self._began[worker]
                self._busy.stop()
                self.bytes_in_flight -= nbytes
                self.bytes_moved += nbytes
                for item, error in zip(run, errors, strict=True):
                    if error is not None or item.checked:
                        self._finish(item, error)
            if unchecked:
                self._checker.submit(functools.partial(self._check_and_finish, unchecked))

    def _next_run(self, worker: int) -> list[_Queued]:
        """Wait for requests; take the most urgent one with its neighbours in the file, and count them as begun.

        Returns:
            The requests in the order of the file; empty if the lane is closed and no request is left.
        """
        with self._lock:
            while (head := self._pop()) is None:
                if self._closing and not self.depth:
                    return []
                self._wanted.wait()
            run = self._with_neighbours(head)
            self._began[worker] = time.monotonic()
            self._busy.start()
            self.bytes_in_flight += sum(item.nbytes for item in run)
            return run

    def _pop(self) -> _Queued | None:
        while self._queue:
            item = heapq.heappop(self._queue)[2]
            if not item.taken:
                self._take(item)
                return item
        return None

    def _with_neighbours(self, head: _Queued) -> list[_Queued]:
        after, room = [head], COALESCED_BYTES - head.nbytes
        before: list[_Queued] = []
        while len(after) < COALESCED_BUFFERS and (item := self._by_start.get((head.priority, after[-1].end))):
            if item.nbytes > room:
                break
            self._take(item)
            after.append(item)
            room -= item.nbytes
        start = head.start
        while len(after) + len(before) < COALESCED_BUFFERS and (item := self._by_end.get((head.priority, start))):
            if item.nbytes > room:
                break
            self._take(item)
            before.append(item)
            room -= item.nbytes
            start = item.start
        return before[::-1] + after

    def _take(self, item: _Queued) -> None:
        item.taken = True
        if item.admitted:
            item.admitted = False
            self._waiting_bytes -= item.nbytes
            self._taken.notify()
        # If two waiting requests begin (or end) at the same byte of the file, the index has the later one. So an entry
        # is removed only if it is that of this request.
        for index, place in ((self._by_start, item.start), (self._by_end, item.end)):
            if index.get((item.priority, place)) is item:
                del index[item.priority, place]

    def _move_run(self, run: Sequence[_Queued]) -> list[BaseException | None]:
        """Move the bytes of contiguous requests, and return the error of each, or None.

        If one system call for several requests fails, they are repeated one by one, to find the ones that fail.
        """
        requests = [item.request for item in run]
        error = _error_of(self._move, requests)
        if error is None or len(run) == 1:
            return [error] * len(run)
        return [_error_of(self._move, [request]) for request in requests]

    def _end(self, item: _Queued, error: BaseException) -> None:
        """Finish a request that failed before it got to a worker."""
        if not item.taken:
            self._take(item)
            self._finish(item, error)

    def _finish(self, item: _Queued, error: BaseException | None) -> None:
        batch = item.batch
        batch.left -= 1
        self.depth -= 1
        if error is not None and batch.error is None:
            batch.error = error
            self._drop_rest(batch)
        if batch.left == 0:
            self._report(batch)

    def _drop_rest(self, batch: _Batch) -> None:
        """Drop all requests of a batch that have not begun, because another one failed or the caller was cancelled."""
        for item in batch.items:
            if not item.taken:
                self._take(item)
                batch.left -= 1
                self.depth -= 1

    def _report(self, batch: _Batch) -> None:
        """Have the event loop resolve the batch's future. One wake-up serves all batches that finish before it."""
        batch.items.clear()
        if self._closing and not self.depth:
            self._wanted.notify_all()
        self._finished.append(batch)
        if len(self._finished) == 1:
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        with self._lock:
            finished, self._finished = self._finished, []
        for batch in finished:
            if batch.error is None:
                batch.done.set_result(None)
            else:
                batch.done.set_exception(batch.error)


def _error_of(work: Callable[[ArgumentT], None], argument: ArgumentT) -> BaseException | None:
    """Call `work` and return its exception, or None.

    Any exception on a worker's thread is passed to the call that waits for the request.
    """
    try:
        work(argument)
    except BaseException as error:
        return error
    return None
