"""Eviction by next use: if the order of uses repeats, memory for a part of the states gives hits for that part of uses.

The references are the optimum (Belady's MIN) and least-recently-used, simulated here on the order of uses.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from storage.base.shard import DType, Kind, SlabKey, SlabSpec, TierName
from storage.memory.host_cache import EvictionOrder, HostCache
from storage.state.slab import NEVER, HostCopy, Slab
from storage.tiers.base import PAGE_BYTES
from storage.tiers.host import HostTier
from tests.unit.storage.builders import Layout, Training, opened
from trainer_client.training.step.trace import Clock, Trace

UNIT_BYTES = 16 << 10
UNITS = tuple(f"unit.{index:02}" for index in range(20))
LAYOUT = Layout(numels=(UNIT_BYTES // 4,), groups=UNITS, with_skips=False)
# The first cycle fills the memory. After all cycles the pattern of hits repeats.
CYCLES = len(UNITS)
OWNER = "rank 0"


@asynccontextmanager
async def stored_units(state_dir: Path, *, room: int) -> AsyncIterator[Training]:
    """Yield a training with all units on NVMe and none in host memory, which has room for `room` units."""
    async with opened(state_dir) as engine:
        training = await Training(engine, LAYOUT).begin()
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
        free = engine.host.budget_bytes - engine.host.used_bytes
        filler = await engine.host.allocate(free - room * UNIT_BYTES)
        yield training
        engine.queue.replace_window(OWNER, [])
        while engine.queue.depth:
            await asyncio.sleep(0.001)
        engine.host.free(filler)


def optimal_hits(order: Sequence[str], room: int) -> int:
    """Return the most hits of any policy that knows the future and begins with an empty memory."""

    def next_use(unit: str, position: int) -> float:
        return next((i for i in range(position + 1, len(order)) if order[i] == unit), math.inf)

    resident: set[str] = set()
    hits = 0
    for position, unit in enumerate(order):
        if unit in resident:
            hits += 1
            continue
        if len(resident) == room:
            resident.remove(max(resident, key=lambda other: next_use(other, position)))
        resident.add(unit)
    return hits


def least_recently_used_hits(order: Sequence[str], room: int) -> int:
    """Return the hits of the least-recently-used policy, which begins with an empty memory."""
    resident: list[str] = []
    hits = 0
    for unit in order:
        hits += unit in resident
        resident = [*(other for other in resident if other != unit), unit][-room:]
    return hits


class Rank:
    """A rank that uses units as a trainer does: it learns the order in one cycle, and then names next uses.

    It prefetches a window of the next `window` units. If `patient`, it waits for them between two uses.
    """

    def __init__(self, training: Training, *, window: int = 0, patient: bool = True) -> None:
        self._training = training
        self._window = window
        self._patient = patient
        self._trace = Trace(Clock())

    async def cycle(self, order: Sequence[str]) -> int:
        """Use units in turn, and return the number of hits."""
        engine, job = self._training.engine, self._training.job
        before = engine.host.counters.hits
        await self._prefetch(held_bytes=0)
        for unit in order:
            index = UNITS.index(unit)
            pin = await engine.pins.fetch(job, unit, Kind.PARAM, float(self._trace.use(index)))
            await self._prefetch(held_bytes=UNIT_BYTES)
            next_use = self._trace.next_use(index)
            engine.pins.unpin(pin, NEVER if next_use is None else float(next_use))
        self._trace.end()
        return engine.host.counters.hits - before

    async def cycles(self, order: Sequence[str], count: int) -> list[int]:
        """Run `count` cycles, and return the hits of each."""
        return [await self.cycle(order) for _ in range(count)]

    async def _prefetch(self, held_bytes: int) -> None:
        if not self._window:
            return
        soon = itertools.islice(self._trace.upcoming(), self._window)
        wants = [(UNITS[index], Kind.PARAM, float(position)) for index, position in soon]
        self._training.engine.pins.prefetch(OWNER, self._training.job, wants)
        if self._patient:
            await self._arrived(held_bytes)

    async def _arrived(self, held_bytes: int) -> None:
        """Wait until all units are there for which there is room. The rest of the window waits for room."""
        quiet = 0
        while quiet < 2:
            await asyncio.sleep(0.0005)
            # A copy is pinned while it is being read, and then counts as leased.
            quiet = quiet + 1 if self._training.engine.host_cache.leased_bytes == held_bytes else 0


async def hits_of(training: Training, period: Sequence[str], cycles: int) -> int:
    """Return the hits if units are fetched and unpinned in turn, each with its next use in the endless order."""
    engine, order = training.engine, [*period] * cycles
    endless = [*order, *period]
    for position, unit in enumerate(order):
        pin = await engine.pins.fetch(training.job, unit, Kind.PARAM, float(position))
        engine.pins.unpin(pin, float(endless.index(unit, position + 1)))
    return engine.host.counters.hits


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
async def test_in_a_cyclic_order_room_for_a_share_of_the_states_hits_at_about_that_share_of_the_uses(
    tmp_path: Path, share: float
) -> None:
    units, room = len(UNITS), int(share * len(UNITS))
    async with stored_units(tmp_path, room=room) as training:
        hits = await hits_of(training, UNITS, CYCLES)
    assert hits == optimal_hits(UNITS * CYCLES, room)
    assert least_recently_used_hits(UNITS * CYCLES, room) == 0
    rate = hits / (units * (CYCLES - 1))
    # The rate is a little below the share, because the unit in use takes room, too.
    assert rate == pytest.approx((room - 1) / (units - 1))
    assert rate == pytest.approx(share, abs=1 / units)


@pytest.mark.parametrize("room", [1, 5, 10, 15, 19])
@pytest.mark.parametrize("order", ["forward and backward", "at random, with repetitions"])
async def test_any_order_that_repeats_hits_as_often_as_is_possible(tmp_path: Path, order: str, room: int) -> None:
    rng = random.Random(room)
    period = UNITS + UNITS[::-1] if order == "forward and backward" else (*UNITS, *rng.choices(UNITS, k=25))
    async with stored_units(tmp_path, room=room) as training:
        hits = await hits_of(training, period, cycles=4)
    assert hits == optimal_hits(period * 4, room) > 0


@pytest.mark.parametrize("room", [3, 5, 10, 15])
@pytest.mark.parametrize("period", [UNITS, UNITS + UNITS[::-1]], ids=["forward", "forward and backward"])
async def test_a_window_that_is_right_never_lowers_the_hits(tmp_path: Path, period: tuple[str, ...], room: int) -> None:
    async with stored_units(tmp_path / "without", room=room) as training:
        without = await Rank(training).cycles(period, 4)
    for window in (1, 2, 8):
        async with stored_units(tmp_path / str(window), room=room) as training:
            counters = training.engine.host.counters
            hits = await Rank(training, window=window).cycles(period, 4)
            assert all(more >= less for more, less in zip(hits, without, strict=True))
            if window < room:
                # The order is known from the second cycle on, so every use is a hit.
                assert hits[1:] == [len(period)] * 3
            assert counters.promotions <= 4 * len(period), "what is prefetched stays until it is used"


@pytest.mark.parametrize("room", [3, 10, 15])
@pytest.mark.parametrize("window", [0, 3])
async def test_a_step_that_leaves_the_trace_is_served_and_the_hits_come_back_with_the_order(
    tmp_path: Path, room: int, window: int
) -> None:
    rng = random.Random(room)
    deviations = [rng.sample(UNITS, len(UNITS)), UNITS[10:], rng.choices(UNITS, k=30)]
    async with stored_units(tmp_path, room=room) as training:
        rank = Rank(training, window=window)
        await rank.cycles(UNITS, 3)
        for deviation in deviations:
            await rank.cycle(deviation)
            # In the first cycle the trace is wrong, because it has learned the deviation. In the second one there are
            # still copies with the wrong next uses that it gave them.
            await rank.cycles(UNITS, 2)
            hits = await rank.cycles(UNITS, 3)
            assert min(hits) >= (len(UNITS) if window else room - 1)


async def test_demands_that_race_with_their_own_prefetches_in_a_wrong_order_all_get_their_bytes(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with stored_units(tmp_path, room=3) as training:
        rank = Rank(training, window=8, patient=False)
        for _ in range(10):
            await rank.cycle(rng.choices(UNITS, k=20))
        training.engine.queue.replace_window(OWNER, [])
        await training.assert_at(0)


async def test_a_pinned_copy_stays_whatever_is_fetched_and_the_rest_is_placed_as_if_it_were_not_there(
    tmp_path: Path,
) -> None:
    room, others = 6, UNITS[1:]
    async with stored_units(tmp_path, room=room) as training:
        engine = training.engine
        pin = await engine.pins.fetch(training.job, UNITS[0], Kind.PARAM)
        before = bytes(engine.host.view(pin.arena_range))
        hits = await hits_of(training, others, CYCLES)
        assert hits == optimal_hits(others * CYCLES, room - 1)
        await Rank(training, window=8, patient=False).cycles(others, 3)
        assert pin.slab.copy is pin.copy and bytes(engine.host.view(pin.arena_range)) == before
        engine.pins.unpin(pin)


@pytest.mark.parametrize("seed", range(3))
async def test_a_long_random_campaign_drops_what_a_search_of_all_copies_finds(seed: int) -> None:
    rng, count = random.Random(seed), 40
    order = EvictionOrder()
    host = HostTier((count + 1) * PAGE_BYTES, order, lambda: None)
    host_cache = HostCache(host, order)
    slabs: list[Slab] = []
    for index in range(count):
        spec = SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=TierName.NVME)
        slab = Slab(SlabKey("job", str(index), Kind.PARAM), spec, PAGE_BYTES // 4, backing=TierName.NVME)
        slab.latest = 0
        slabs.append(slab)
    for turn in range(4000):
        slab = rng.choice(slabs)
        position = float(turn + rng.randint(1, 50)) if rng.random() < 0.9 else NEVER
        if slab.copy is None:
            range_ = host.try_allocate(PAGE_BYTES, later_than=NEVER)
            assert range_ is not None, "there is room for all"
            slab.copy = HostCopy(range_, step=0, at_home=False)
            host_cache.pin(slab.copy)
        elif slab.copy.pins:
            host_cache.unpin(slab, slab.copy, position)
        elif rng.random() < 0.4:
            host_cache.pin(slab.copy)
        elif rng.random() < 0.4:
            host_cache.set_next_use(slab, position)
        else:
            idle = {s: s.copy.next_use for s in slabs if s.copy is not None and not s.copy.pins}
            farthest = max(idle.values())
            assert order.evict(farthest) is None
            evicted = order.evict(None)
            assert evicted is not None
            host.arena.free(evicted)
            (gone,) = (s for s in idle if s.copy is None)
            assert idle[gone] == farthest
    host.arena.close()
