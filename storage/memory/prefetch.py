"""The asynchronous fetch queue: it brings slabs from NVMe into the host tier, in the order in which they are needed.

This module owns the fetches that wait or run. It must never raise or block because a client deviates from its trace.

A demand fetch is served before any prefetch. Prefetches share a byte budget. Inside a job they run in trace order, and
between jobs fairly, because trace positions of different jobs do not compare: a job that has run for a week has high
positions, and would wait for each job that began after it. A prefetch evicts only copies that are needed later than its
own slab.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from storage.base.fair_queue import FairQueue, Share
from storage.base.tracing import Activity, Tracer
from storage.memory.host_cache import HostCache
from storage.state.slab import NEVER, HostCopy, Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.base import round_up
from storage.tiers.contract import Region
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority

# The most fetched copies that are sent to copy tiers at once. A copy beyond them is not sent, but may be sent when it
# is fetched again.
MOST_SENT_AT_ONCE = 2
NO_WRITES: Mapping[Slab, asyncio.Future[Any]] = {}


@dataclass(slots=True, eq=False)
class _Fetch:
    """A slab to fetch: for the windows of `owners` (a prefetch), for `waiters` (a demand fetch), or for both.

    Attributes:
        slab: the slab.
        position: the trace position at which the slab is needed, by which a prefetch waits for its turn.
        owners: the owners of the windows that name the slab.
        waiters: the demands, each of which gets a pin of the copy.
        task: the task that reads the bytes; None if the fetch has not begun.
        activity: the activity as which the fetch is traced; None if the fetch has not begun.
    """

    slab: Slab
    position: float
    owners: set[str] = field(default_factory=set)
    waiters: list[asyncio.Future[HostCopy]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    activity: Activity | None = None

    @property
    def priority(self) -> Priority:
        """The priority of the read: a fetch with waiters is a demand."""
        return Priority.DEMAND if self.waiters else Priority.PREFETCH


@dataclass(slots=True)
class Fetched:
    """Counters of one job's reads from NVMe: their bytes, and the sum of the seconds that each read took."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowState:
    """The window of one owner: its slabs, and how many of them are in host memory, are being read, or wait."""

    owner: str
    slabs: int
    nbytes: int
    present: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The numbers of fetches that have begun, that wait, and that a client waits for (`demands`), for operators."""

    in_flight_bytes: int
    in_flight_budget_bytes: int
    running: int
    waiting: int
    demands: int


class PrefetchQueue:
    """Fetches slabs from NVMe into the host tier, for all jobs of one store: on demand, and ahead for windows."""

    def __init__(
        self,
        host: HostTier,
        backing: BackingTiers,
        host_cache: HostCache,
        tracer: Tracer,
        *,
        in_flight_bytes: int,
        weight_of: Callable[[str], float],
    ) -> None:
        """Make an empty queue.

        Args:
            in_flight_bytes: prefetches under way have at most this many bytes together; one alone may have more.
            weight_of: returns the weight of a job, by its name, in the fair order between jobs.
        """
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._tracer = tracer
        self._in_flight_budget = in_flight_bytes
        self._in_flight = 0
        self._weight_of = weight_of
        self._fetches: dict[Slab, _Fetch] = {}
        # Prefetches that have not started.
        self._waiting: FairQueue[_Fetch] = FairQueue()
        self._windows: dict[str, dict[Slab, float]] = {}
        self._fetched: dict[str, Fetched] = {}
        # The tasks that send fetched copies to lenders.
        self._sending: set[asyncio.Task[None]] = set()
        host.when_room_is_made(self._pump)

    @property
    def depth(self) -> int:
        """The number of fetches from NVMe that wait or run, on demand and for windows."""
        return len(self._fetches)

    @property
    def sending(self) -> int:
        """The number of fetched copies that are being sent to lenders."""
        return len(self._sending)

    def fetched(self, job: str) -> Fetched:
        """Return the counters of the bytes that were read for a job since the store was opened."""
        return self._fetched.setdefault(job, Fetched())

    def forget_job(self, job: str) -> None:
        """Forget the counters of a job that was deleted."""
        self._fetched.pop(job, None)

    @property
    def state(self) -> QueueState:
        """The numbers of fetches that run or wait at this instant, and their bytes."""
        running = sum(fetch.task is not None for fetch in self._fetches.values())
        return QueueState(
            in_flight_bytes=self._in_flight,
            in_flight_budget_bytes=self._in_flight_budget,
            running=running,
            waiting=len(self._fetches) - running,
            demands=sum(bool(fetch.waiters) for fetch in self._fetches.values()),
        )

    @property
    def fetched_by_job(self) -> Mapping[str, Fetched]:
        """The counters of the bytes that were read for each job since the store was opened."""
        return dict(self._fetched)

    @property
    def owners(self) -> list[str]:
        """The names of the owners that have a prefetch window. The daemon uses the ids of its sessions as names."""
        return list(self._windows)

    def window(self, owner: str) -> WindowState:
        """Return the state of an owner's window, which is empty if the owner has none."""
        window = self._windows.get(owner, {})
        present = sum(slab.current_copy is not None for slab in window)
        running = sum((fetch := self._fetches.get(slab)) is not None and fetch.task is not None for slab in window)
        return WindowState(
            owner=owner,
            slabs=len(window),
            nbytes=sum(slab.paged_bytes for slab in window),
            present=present,
            running=running,
            waiting=max(0, len(window) - present - running),
        )

    async def promote(self, slab: Slab) -> bool:
        """Bring a slab's newest bytes into free room of the host tier, and return whether they are there.

        No copy is evicted for this, and the new copy is the first one to be evicted when other bytes need room.
        """
        fetch = self._fetches.get(slab)
        if fetch is None or fetch.task is None:
            if (range_ := self._host.try_allocate(round_up(slab.nbytes), NEVER)) is None:
                return False
            fetch = fetch or self._add(slab, NEVER)
            self._leave_queue(fetch)
            self._start(fetch, range_)
        assert fetch.task is not None
        await asyncio.wait([fetch.task])
        return slab.current_copy is not None

    async def fetch(self, slab: Slab, position: float) -> HostCopy:
        """Return the newest bytes of a slab in the host tier, pinned for the caller; wait for room and for the device.

        Raises:
            BudgetExceededError: the slab can never fit, or there was no room before the deadline; the slab is
                unchanged.
            DataLossError: the bytes were kept in host memory only, and are gone, or they are damaged.
            DeviceError: the bytes cannot be read.
        """
        if copy := slab.current_copy:
            self._host.counters.hits += 1
            self._host_cache.pin(copy)
            return copy
        self._host.counters.misses += 1
        fetch = self._fetches.get(slab) or self._add(slab, position)
        waiter: asyncio.Future[HostCopy] = asyncio.get_running_loop().create_future()
        fetch.waiters.append(waiter)
        if fetch.task is None:
            self._leave_queue(fetch)
            self._start(fetch, None)
        # The traced span of a prefetch does not show for how long a client waits for the prefetch to end, so the
        # client's wait has a span of its own.
        is_late = fetch.activity is Activity.PREFETCH
        try:
            with self._tracer.span(Activity.DEMAND_FETCH, slab.label(slab.latest or 0)) if is_late else nullcontext():
                return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._host_cache.unpin(slab, waiter.result())
            elif waiter in fetch.waiters:
                fetch.waiters.remove(waiter)
                self._drop_if_unwanted(fetch)
            raise

    def replace_window(
        self,
        owner: str,
        wants: Iterable[tuple[Slab, float]],
        writes: Mapping[Slab, asyncio.Future[Any]] = NO_WRITES,
    ) -> None:
        """Replace the slabs, each with its trace position, that `owner` will need soon.

        A fetch that has not started is dropped if neither a window nor a waiter wants it any more. A copy of a slab
        that the owner no longer wants becomes the first one to be evicted.

        Args:
            writes: slabs that are being written now, each with the write's task. Such a slab is fetched when its
                write is done, if the window still names it.
        """
        window = dict(wants)
        before = self._windows.pop(owner, {})
        if window:
            self._windows[owner] = window
        for slab, position in before.items():
            # A slab that has left the window loses the next use that the window gave it. If a client has set another
            # next use meanwhile, by releasing a lease, that one is kept.
            if slab not in window and slab.copy is not None and slab.copy.next_use == position:
                self._host_cache.set_next_use(slab, NEVER)
        for fetch in list(self._fetches.values()):
            if owner in fetch.owners and fetch.slab not in window:
                fetch.owners.discard(owner)
                self._drop_if_unwanted(fetch)
        for slab, position in window.items():
            if (write := writes.get(slab)) is not None:
                # An update will write the slab, in the slab's copy in the host tier if there is one. So the copy gets
                # its next use now, and the cache does not evict it before the update.
                self._host_cache.set_next_use(slab, position)
                write.add_done_callback(partial(self._want_written, owner, window, slab))
            else:
                self._want(owner, slab, position)
        self._pump()

    def _want(self, owner: str, slab: Slab, position: float) -> None:
        """Queue the fetch of a slab of a window, unless the slab's newest bytes are in the host tier."""
        if slab.current_copy:
            self._host_cache.set_next_use(slab, position)
            return
        fetch = self._fetches.get(slab) or self._add(slab, position)
        fetch.owners.add(owner)
        if fetch.position != position or (fetch.task is None and fetch not in self._waiting):
            fetch.position = position
            self._leave_queue(fetch)
            if fetch.task is None:
                job = slab.key.job_name
                self._waiting.push(fetch, (Share(job, self._weight_of(job)),), order=position)

    def _want_written(self, owner: str, window: dict[Slab, float], slab: Slab, write: asyncio.Future[Any]) -> None:
        """Queue the fetch of a slab whose update is done, unless that failed or `owner` has another window by now."""
        if self._windows.get(owner) is window and not write.cancelled() and write.exception() is None:
            self._want(owner, slab, window[slab])
            self._pump()

    async def close(self) -> None:
        """Drop the fetches that have not started, and cancel and wait for the others."""
        tasks = [fetch.task for fetch in self._fetches.values() if fetch.task]
        for fetch in self._fetches.values():
            for waiter in fetch.waiters:
                waiter.cancel()
        for fetch in [fetch for fetch in self._fetches.values() if fetch.task is None]:
            self._leave_queue(fetch)
            del self._fetches[fetch.slab]
        for task in (*tasks, *self._sending):
            task.cancel()
        await asyncio.gather(*tasks, *self._sending, return_exceptions=True)

    def _add(self, slab: Slab, position: float) -> _Fetch:
        fetch = _Fetch(slab, position)
        self._fetches[slab] = fetch
        return fetch

    def _leave_queue(self, fetch: _Fetch) -> None:
        if fetch in self._waiting:
            self._waiting.remove(fetch)

    def _drop_if_unwanted(self, fetch: _Fetch) -> None:
        """Drop a fetch that has not started, if no window and no waiter wants it."""
        if not fetch.task and not fetch.owners and not fetch.waiters:
            self._leave_queue(fetch)
            self._fetches.pop(fetch.slab, None)

    def _pump(self) -> None:
        """Start the waiting prefetches for which the budget of prefetches and the host tier have room now."""
        without_room: set[str] = set()
        while (fetch := self._waiting.peek(excluding=without_room)) is not None:
            nbytes = round_up(fetch.slab.nbytes)
            if self._in_flight and self._in_flight + nbytes > self._in_flight_budget:
                return
            range_ = self._host.try_allocate(nbytes, fetch.position)
            if range_ is None:
                # A slab of the job that is needed later may evict even fewer copies than this one, so the whole job is
                # skipped until there is more room.
                without_room.add(fetch.slab.key.job_name)
                continue
            self._waiting.take(fetch, nbytes)
            self._start(fetch, range_)

    def _start(self, fetch: _Fetch, range_: ArenaRange | None) -> None:
        nbytes = round_up(fetch.slab.nbytes)
        self._in_flight += nbytes
        fetch.task = asyncio.ensure_future(self._run(fetch, range_, nbytes))

    async def _run(self, fetch: _Fetch, range_: ArenaRange | None, nbytes: int) -> None:
        slab = fetch.slab
        fetch.activity = Activity.DEMAND_FETCH if fetch.waiters else Activity.PREFETCH
        try:
            with self._host.counters.fetching, self._tracer.span(fetch.activity, slab.label(slab.latest or 0), nbytes):
                copy = await self._load(fetch, range_)
        except BaseException as error:
            del self._fetches[slab]
            for waiter in fetch.waiters:
                if not waiter.done():
                    waiter.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise
        else:
            del self._fetches[slab]
            for waiter in fetch.waiters:
                if not waiter.done():
                    self._host_cache.pin(copy)
                    waiter.set_result(copy)
            self._send_copy(slab, copy, fetch.position)
            self._host_cache.unpin(slab, copy, fetch.position if fetch.owners else NEVER)
        finally:
            self._in_flight -= nbytes
            self._pump()

    def _send_copy(self, slab: Slab, copy: HostCopy, position: float) -> None:
        """Begin to send fetched bytes to a copy tier that has room for them, so that the next fetch takes less time.

        The copy is pinned while its bytes are sent, so that they do not change.
        """
        region = None if copy.step is None or copy.at_home else slab.versions.get(copy.step)
        if region is None or len(self._sending) >= MOST_SENT_AT_ONCE:
            return
        if self._backing.begin_copy(region, None, position) and not self._backing.has_copy(region):
            self._host_cache.pin(copy)
            task = asyncio.ensure_future(self._send(slab, copy, region))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, slab: Slab, copy: HostCopy, region: Region) -> None:
        try:
            await self._backing.send_copy(region, self._host.view(copy.arena_range))
        finally:
            self._host_cache.unpin(slab, copy, copy.next_use)

    async def _load(self, fetch: _Fetch, range_: ArenaRange | None) -> HostCopy:
        """Return a pinned copy of the slab's newest bytes. If the bytes change while they are read, read them again."""
        slab = fetch.slab
        if range_ is not None and (slab.deleted or (slab.copy is not None and slab.copy.at_home)):
            # The bytes of a slab at home are read into the copy that it has, so this range is not needed.
            self._host.free(range_)
            range_ = None
        while (copy := slab.copy) is not None and copy.at_home and copy.is_written:
            await copy.idle.wait()
        slab.check_present()
        if copy is not None and copy.at_home:
            # If a copy at home does not have the newest bytes, a roll-back has discarded them, so the bytes of the
            # older step are read into it.
            self._host_cache.pin(copy)
        else:
            if range_ is None:
                range_ = await self._host_cache.room_for(slab)
            copy = HostCopy(range_, step=None, at_home=slab.at_home_in_host)
            self._host_cache.pin(copy)
            # While this fetch waited for room, an update may have given the slab a copy that it writes to. The fetched
            # copy becomes the slab's copy instead, so that readers get the old bytes. The update's copy is freed when
            # the update releases its pin.
            self._host_cache.free_copy(slab)
            slab.copy = copy
        # The slab's stamp (a number that changes with its newest bytes) shows whether the copy still has the newest
        # bytes. The number of their step does not show it, because an update that was withdrawn may have been made
        # again in the same step.
        stamp = slab.stamp if slab.current_copy is copy else None
        try:
            while stamp != slab.stamp:
                if slab.copy is not copy and (newer := slab.current_copy):
                    # A put replaced the slab's copy while this fetch read bytes into the former one, so the newer copy
                    # is returned.
                    self._host_cache.pin(newer)
                    self._host_cache.unpin(slab, copy)
                    return newer
                stamp, latest = slab.stamp, slab.latest
                await self._read(slab, latest, self._host.view(copy.arena_range), fetch.priority)
                copy.step = latest
        except BaseException:
            self._host_cache.unpin(slab, copy)
            raise
        self._host.counters.promotions += 1
        return copy

    async def _read(self, slab: Slab, step: int | None, view: memoryview, priority: Priority) -> None:
        if step is None:
            view[:] = bytes(len(view))
            return
        began = time.perf_counter()
        await self._backing.read_into(slab.source(step), 0, view, priority)
        fetched = self.fetched(slab.key.job_name)
        fetched.nbytes += slab.nbytes
        fetched.seconds += time.perf_counter() - began
