"""The fetch queue reads first what is needed first, drops unwanted prefetches, and neither blocks nor leaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.base import syscalls
from storage.base.errors import BudgetExceededError, NotFoundError
from storage.base.shard import Kind
from storage.base.shown_sizes import shown_size
from storage.base.tracing import Activity, Span
from storage.engine import Engine
from storage.steps.pins import Pin
from storage.tiers import threaded_io
from tests.unit.storage.builders import Layout, Training, on_nvme, opened

UNITS = tuple("abcdefgh")
UNIT_BYTES = 64 << 10
LAYOUT = Layout(numels=(UNIT_BYTES // 4,), groups=UNITS, with_skips=False)


class SlowDisk:
    """A disk whose one read thread waits until the test calls `open`. `order` names the reads that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.names: Callable[[int], str] = str
        self._permits = threading.Semaphore(0)
        self._open = False
        self._real = syscalls.read_exact
        monkeypatch.setattr(syscalls, "read_exact", self._read)
        # Without coalescing each request is a read of its own, even if it has neighbours.
        monkeypatch.setattr(threaded_io, "COALESCED_BYTES", 0)

    def open(self) -> None:
        """Allow all reads."""
        self._open = True
        self._permits.release(1000)

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        self.order.append(self.names(offset))
        if not self._open:
            assert self._permits.acquire(timeout=20)
        self._real(fd, buffers, offset, path)


@asynccontextmanager
async def stored_units(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, *, units: int = 4, **changes: Any
) -> AsyncIterator[tuple[Training, SlowDisk]]:
    """Yield a training with all units on NVMe and none in host memory, and its disk.

    Host memory has room for `units` units, and for one gradient of each.
    """
    # Tiles take a part of the host budget. The rest is for units, and for gradients, which are not there yet.
    async with opened(state_dir, io_read_threads=1, **changes) as engine:
        training = await Training(engine, LAYOUT).begin()
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
        free = engine.host.budget_bytes - engine.host.used_bytes
        filler = await engine.host.allocate(free - units * UNIT_BYTES)
        disk = SlowDisk(monkeypatch)
        extents = {on_nvme(r).extents[0].offset: s.key.group for s in training.job.slabs() for r in s.versions.values()}
        disk.names = extents.__getitem__
        try:
            yield training, disk
        finally:
            disk.open()
            # After a failure, prefetches of the windows may wait for room without end.
            for owner in engine.queue.owners:
                engine.queue.replace_window(owner, [])
            while engine.queue.depth:
                await asyncio.sleep(0.001)
            engine.host.free(filler)


def window(training: Training, units: str, *, first: float = 1.0, owner: str = "rank 0") -> None:
    wants = [(unit, Kind.PARAM, first + index) for index, unit in enumerate(units)]
    training.engine.pins.prefetch(owner, training.job, wants)


def fetching(training: Training, unit: str, position: float = 0.0) -> asyncio.Task[Pin]:
    return asyncio.ensure_future(training.engine.pins.fetch(training.job, unit, Kind.PARAM, position))


def resident(training: Training) -> str:
    slabs = [slab for slab in training.job.slabs() if slab.key.kind is Kind.PARAM]
    return "".join(slab.key.group for slab in slabs if slab.current_copy is not None)


async def reads(disk: SlowDisk, count: int) -> None:
    """Wait until `count` reads have begun."""
    async with asyncio.timeout(10):
        while len(disk.order) < count:
            await asyncio.sleep(0.001)


async def idle(training: Training) -> None:
    async with asyncio.timeout(10):
        while training.engine.queue.depth:
            await asyncio.sleep(0.001)


async def test_a_window_is_read_in_the_order_of_its_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stored_units(tmp_path, monkeypatch, units=5) as (training, disk):
        positions = {"d": 4.0, "b": 2.0, "e": 5.0, "a": 1.0, "c": 3.0}
        training.engine.pins.prefetch("rank 0", training.job, [(unit, Kind.PARAM, p) for unit, p in positions.items()])
        disk.open()
        await idle(training)
        assert "".join(disk.order) == "abcde" == resident(training)
        hits = training.engine.host.counters.hits
        pin = await fetching(training, "c")
        assert training.engine.host.counters.hits == hits + 1 and len(disk.order) == 5
        training.engine.pins.unpin(pin)


async def test_a_demand_overtakes_prefetches_that_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_units(tmp_path, monkeypatch, units=6) as (training, disk):
        window(training, "abcd")
        await reads(disk, 1)
        demand = fetching(training, "h")
        await asyncio.sleep(0.01)
        disk.open()
        training.engine.pins.unpin(await demand)
        await idle(training)
        assert "".join(disk.order) == "ahbcd"


async def test_the_wait_for_a_prefetch_that_is_late_is_told_as_a_demand_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_units(tmp_path, monkeypatch, units=4) as (training, disk):
        spans: list[Span] = []
        training.engine.tracer.listen(spans.append)
        window(training, "a")
        await reads(disk, 1)
        late = [fetching(training, "a") for _ in range(2)]
        while not training.engine.queue.state.demands:
            await asyncio.sleep(0)
        late[0].cancel()
        disk.open()
        training.engine.pins.unpin(await late[1])
        training.engine.pins.unpin(await fetching(training, "b"))
        await idle(training)
    told = [span for span in spans if span.activity in (Activity.DEMAND_FETCH, Activity.PREFETCH)]
    # The bytes count once, and so does a read that began as a demand.
    assert sorted((span.subject[0], span.activity.value, span.nbytes) for span in told) == [
        ("a", "demand fetch", 0),
        ("a", "demand fetch", 0),
        ("a", "prefetch", UNIT_BYTES),
        ("b", "demand fetch", UNIT_BYTES),
    ]


async def test_a_demand_overtakes_prefetches_that_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_units(tmp_path, monkeypatch, units=2) as (training, disk):
        disk.open()
        pins = [await fetching(training, "a"), await fetching(training, "b")]
        window(training, "cd")
        demand = fetching(training, "h")
        await asyncio.sleep(0.02)
        assert not demand.done() and resident(training) == "ab"
        training.engine.pins.unpin(pins[0])
        training.engine.pins.unpin(await demand)
        assert disk.order[2] == "h"
        training.engine.pins.unpin(pins[1])


async def test_a_prefetch_never_displaces_what_is_needed_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_units(tmp_path, monkeypatch, units=3) as (training, disk):
        disk.open()
        window(training, "abcdefgh")
        async with asyncio.timeout(10):
            while resident(training) != "abc":
                await asyncio.sleep(0.001)
        assert training.engine.queue.depth == 5, "the rest waits for room"
        # The trainer has used these units, and their next use is far away.
        for unit in "ab":
            training.engine.pins.unpin(await fetching(training, unit), next_use=100.0)
        async with asyncio.timeout(5):
            while resident(training) != "cde":
                await asyncio.sleep(0.001)
        window(training, "")


async def test_a_new_window_replaces_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stored_units(tmp_path, monkeypatch, units=6) as (training, disk):
        window(training, "abcd")
        await reads(disk, 1)
        # Reads that have begun, or that wait for the one thread, go on. Units in both windows stay wanted.
        window(training, "de", owner="rank 1")
        window(training, "f")
        assert training.engine.queue.depth <= 6
        disk.open()
        await idle(training)
        assert set("adef") <= set(resident(training))


async def test_what_has_not_started_is_dropped_with_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stored_units(tmp_path, monkeypatch, units=6, prefetch_bytes=UNIT_BYTES) as (training, disk):
        window(training, "abcdef")
        await reads(disk, 1)
        assert training.engine.queue.depth == 6
        window(training, "gf")
        disk.open()
        await idle(training)
        assert "".join(disk.order) == "agf"
        training.engine.queue.replace_window("rank 0", [])
        assert training.engine.queue.depth == 0


async def test_what_is_not_wanted_any_more_is_the_first_to_be_displaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_units(tmp_path, monkeypatch, units=3) as (training, disk):
        disk.open()
        window(training, "abc", first=1.0)
        await idle(training)
        # The model takes another path. Positions grow, so the stale ones are lower than all later ones.
        window(training, "def", first=10.0)
        await idle(training)
        assert resident(training) == "def"


async def test_a_next_use_named_by_a_lease_outlives_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stored_units(tmp_path, monkeypatch, units=2) as (training, disk):
        disk.open()
        window(training, "ab", first=1.0)
        await idle(training)
        training.engine.pins.unpin(await fetching(training, "a"), next_use=2.5)
        window(training, "bc", first=2.0)
        await asyncio.sleep(0.02)
        window(training, "cd", first=3.0)
        # b is stale, so it is evicted for c. a is not evicted, because its next use comes before that of c.
        async with asyncio.timeout(10):
            while resident(training) != "ac":
                await asyncio.sleep(0.001)
        window(training, "")


async def test_bytes_in_flight_stay_within_the_budget_but_one_slab_always_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for budget, started in ((1, 1), (2 * UNIT_BYTES, 2), (3 * UNIT_BYTES - 1, 2)):
        directory = tmp_path / str(budget)
        async with stored_units(directory, monkeypatch, units=6, prefetch_bytes=budget) as (training, disk):
            window(training, "abcdef")
            await reads(disk, 1)
            copies = [slab for slab in training.job.slabs() if slab.copy is not None and slab.copy.pins]
            assert len(copies) == started
            disk.open()
            await idle(training)
            assert resident(training) == "abcdef"


@pytest.mark.parametrize("weight", [1.0, 3.0])
async def test_jobs_share_the_disk_by_their_weights_whatever_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    """One job has run for long and has large positions, the other one has just begun."""
    weights = {"new": weight}
    async with stored_units(
        tmp_path,
        monkeypatch,
        units=16,
        prefetch_bytes=UNIT_BYTES,
        weight_of=lambda job: weights.get(job, 1.0),
    ) as (old, disk):
        engine = old.engine
        new = await Training(engine, replace(LAYOUT, name="new")).begin()
        for slab in new.job.slabs():
            engine.host_cache.free_copy(slab)
        slabs = [*old.job.slabs(), *new.job.slabs()]
        names = {on_nvme(r).extents[0].offset: s.key.job[0] + s.key.group for s in slabs for r in s.versions.values()}
        disk.names = names.__getitem__
        window(old, "abcdefgh", first=1e6, owner="rank of old")
        await reads(disk, 1)
        window(new, "abcdefgh", first=1.0, owner="rank of new")
        disk.open()
        await idle(old)
        of_new = [name[1] for name in disk.order if name[0] == "n"]
        of_old = [name[1] for name in disk.order if name[0] != "n"]
        assert of_new == of_old == list(UNITS), "in order inside a job"
        # The first read is left out, because the old job was alone then.
        shared = disk.order[1:9]
        assert abs(sum(name[0] == "n" for name in shared) - 8 * weight / (1 + weight)) <= 1, disk.order


async def test_a_job_without_room_does_not_hold_up_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stored_units(tmp_path, monkeypatch, units=2) as (training, disk):
        engine = training.engine
        other = await Training(engine, replace(LAYOUT, name="other")).begin()
        for slab in other.job.slabs():
            engine.host_cache.free_copy(slab)
        slabs = [*training.job.slabs(), *other.job.slabs()]
        disk.names = {on_nvme(r).extents[0].offset: s.key.group for s in slabs for r in s.versions.values()}.__getitem__
        disk.open()
        window(training, "ab", first=10.0)
        await idle(training)
        # The units in memory are next used from position 10 on. The first window's new unit is needed later than that,
        # and the other job's unit is needed sooner.
        window(training, "abc", first=10.0)
        window(other, "d", first=5.0, owner="rank of other")
        async with asyncio.timeout(5):
            while other.job.slab("d", Kind.PARAM).current_copy is None:
                await asyncio.sleep(0.001)
        window(training, "")
        await idle(training)


async def test_a_demand_behind_leases_is_refused_at_its_deadline_and_served_once_one_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_units(tmp_path, monkeypatch, units=2, admission_timeout_seconds=0.1) as (training, disk):
        disk.open()
        engine = training.engine
        pins = [await fetching(training, "a"), await fetching(training, "b")]
        used = engine.host.used_bytes
        demands = [fetching(training, unit) for unit in "hhg"]
        window(training, "gc")
        for demand in demands:
            with pytest.raises(BudgetExceededError) as caught:
                await demand
            assert f"had no room for {shown_size(UNIT_BYTES)} for 0.1 s: {shown_size(used)} are used" in str(
                caught.value
            )
            assert f"{shown_size(2 * UNIT_BYTES)} of them by copies that are leased" in str(caught.value)
        assert resident(training) == "ab" and (engine.host.queue_depth, engine.host.used_bytes) == (0, used)
        engine.pins.unpin(pins.pop())
        engine.pins.unpin(await fetching(training, "h"))
        await idle(training)
        engine.pins.unpin(await fetching(training, "g"))
        engine.pins.unpin(pins.pop())


async def test_waiters_that_give_up_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stored_units(tmp_path, monkeypatch, units=2) as (training, disk):
        used = training.engine.host.used_bytes
        reading = [fetching(training, "a") for _ in range(2)]
        await reads(disk, 1)
        others = [fetching(training, unit) for unit in "bcd"]
        await asyncio.sleep(0.01)
        for task in [reading[0], *others]:
            task.cancel()
        await asyncio.wait([reading[0], *others])
        disk.open()
        pin = await reading[1]
        await idle(training)
        assert training.engine.host_cache.leased_bytes == UNIT_BYTES
        training.engine.pins.unpin(pin)
        assert training.engine.host_cache.leased_bytes == 0
        assert training.engine.host.used_bytes <= used + 2 * UNIT_BYTES


async def test_a_waiter_cancelled_as_its_bytes_arrive_gives_its_pin_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_units(tmp_path, monkeypatch) as (training, disk):
        slab = training.job.slab("a", Kind.PARAM)
        task = fetching(training, "a")
        await reads(disk, 1)
        disk.open()
        # The fetch is cancelled after its bytes have arrived and before its task runs again.
        while slab.current_copy is None:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await idle(training)
        assert training.engine.host_cache.leased_bytes == 0 or not task.cancelled()
        if not task.cancelled():
            training.engine.pins.unpin(task.result())


async def test_many_waiters_share_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stored_units(tmp_path, monkeypatch) as (training, disk):
        tasks = [fetching(training, "a") for _ in range(5)]
        await reads(disk, 1)
        disk.open()
        pins = await asyncio.gather(*tasks)
        assert disk.order == ["a"] and len({pin.arena_range for pin in pins}) == 1
        for pin in pins:
            training.engine.pins.unpin(pin)


async def test_an_update_makes_a_prefetched_copy_stale_and_the_fetch_gives_the_new_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        for step in range(1, 5):
            window(training, "abcdefgh", first=float(step))
            await training.hand_over()
            window(training, "hgfedcba", first=step + 0.5)
            pins: list[Pin] = [await fetching(training, unit) for unit in "ah"]
            assert {pin.copy.step for pin in pins} == {step}, "the update is waited for"
            for pin in pins:
                engine.pins.unpin(pin)
            await training.commit(step)
            await training.assert_at(step)


async def test_a_copy_that_is_being_read_while_its_slab_is_updated_stays_as_it_was(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(numels=(5_000,), groups=("a",))).begin()
        pin = await fetching(training, "a")
        before = bytes(engine.host.view(pin.arena_range))
        await training.step()
        assert bytes(engine.host.view(pin.arena_range)) == before
        newer = await fetching(training, "a")
        assert (pin.copy.step, newer.copy.step) == (0, 1)
        engine.pins.unpin(pin)
        engine.pins.unpin(newer)
        await training.assert_at(1)


async def test_what_an_update_is_about_to_replace_is_fetched_once_when_that_is_done(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        fetched = engine.queue.fetched(LAYOUT.name)
        for step, wanted in ((1, "abcdefgh"), (2, "cd")):
            for slab in training.job.slabs():
                engine.host_cache.free_copy(slab)
            before = fetched.nbytes
            await training.hand_over()
            # Until the gradients are freed there is no room for the updated parameters, which updates leave in memory.
            filler = await engine.host.allocate(engine.host.budget_bytes - engine.host.used_bytes)
            window(training, "abcdefgh")
            window(training, wanted)
            await training.finish_updates()
            engine.host.free(filler)
            await training.commit(step)
            await idle(training)
            assert set(resident(training)) >= set(wanted), "the newest window counts"
            assert 0 < fetched.nbytes - before <= len(wanted) * UNIT_BYTES, "the old bytes are not read"
            assert fetched.seconds > 0
            await training.assert_at(step)
        assert list(engine.queue.fetched_by_job) == [LAYOUT.name]
        await engine.delete_job(LAYOUT.name)
        assert not engine.queue.fetched_by_job


async def test_an_unknown_slab_is_refused_and_the_window_stays(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        with pytest.raises(NotFoundError, match="no shard group 'zzz'"):
            engine.pins.prefetch("rank 0", training.job, [("a", Kind.PARAM, 1.0), ("zzz", Kind.PARAM, 2.0)])
        with pytest.raises(NotFoundError, match="has no slab of kind master"):
            engine.pins.prefetch("rank 0", training.job, [("a", Kind.MASTER, 1.0)])


async def test_closing_drops_what_has_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, io_read_threads=1) as engine:
        training = await Training(engine, LAYOUT).begin()
    engine = await Engine.open(engine.config)
    training = await Training(engine, LAYOUT).open()
    disk = SlowDisk(monkeypatch)
    window(training, "abcd")
    waiter = fetching(training, "h")
    await reads(disk, 1)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0.02)
    disk.open()
    await asyncio.wait_for(closing, 10)
    assert waiter.cancelled()
