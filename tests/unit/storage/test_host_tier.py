"""Allocations in the host tier wait in turn, leak nothing at a time-out, and evict the copy with the farthest use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from storage.base.errors import BudgetExceededError
from storage.base.shard import DType, Kind, SlabKey, SlabSpec, TierName
from storage.base.shown_sizes import shown_size
from storage.memory.host_cache import EvictionOrder, HostCache
from storage.state.slab import NEVER, HostCopy, Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.base import PAGE_BYTES
from storage.tiers.host import HostTier
from tests.unit.storage.builders import Layout, Training, opened

PAGES = 8


@pytest.fixture
def order() -> EvictionOrder:
    """What makes room in `host`."""
    return EvictionOrder()


@pytest.fixture
def host(order: EvictionOrder) -> Iterator[HostTier]:
    """A tier with PAGES free pages."""
    tier = HostTier((PAGES + 1) * PAGE_BYTES, order, lambda: None)
    yield tier
    tier.arena.close()


def waiting(host: HostTier, pages: int) -> asyncio.Task[ArenaRange]:
    return asyncio.ensure_future(host.allocate(pages * PAGE_BYTES))


async def turn() -> None:
    """Let every task run that can run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiters_are_served_in_the_order_of_their_coming_however_small(host: HostTier) -> None:
    everything = await host.allocate(PAGES * PAGE_BYTES)
    order: list[int] = []
    tasks = []
    for index, pages in enumerate((5, 1, 2)):
        tasks.append(waiting(host, pages))
        tasks[-1].add_done_callback(partial(lambda index, _: order.append(index), index))
    await turn()
    assert host.queue_depth == 3
    host.free(everything)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2] and host.used_bytes == (1 + 8) * PAGE_BYTES


async def test_the_time_in_which_requests_wait_is_counted_once_and_while_they_wait(host: HostTier) -> None:
    everything = await host.allocate(PAGES * PAGE_BYTES)
    assert host.waiting.elapsed == 0
    began = time.perf_counter()
    tasks = [waiting(host, 1), waiting(host, 2)]
    await asyncio.sleep(0.02)
    assert host.waiting.elapsed > 0.015
    host.free(everything)
    await asyncio.gather(*tasks)
    waited = host.waiting.elapsed
    assert 0.015 < waited < time.perf_counter() - began, "the two waited at the same time"
    await asyncio.sleep(0.01)
    assert host.waiting.elapsed == waited, "none waits any more"


async def test_a_small_request_does_not_overtake_a_large_one_that_waits(host: HostTier) -> None:
    half = await host.allocate(4 * PAGE_BYTES)
    large, small = waiting(host, 6), waiting(host, 1)
    await turn()
    assert not small.done(), "there is room for it, but it came later"
    assert host.try_allocate(PAGE_BYTES, later_than=0.0) is None, "prefetches yield to all who wait"
    host.free(half)
    await asyncio.gather(large, small)


async def test_a_waiter_that_gives_up_lets_the_next_one_through(host: HostTier) -> None:
    await host.allocate(4 * PAGE_BYTES)
    large, small = waiting(host, 6), waiting(host, 1)
    await turn()
    large.cancel()
    await asyncio.wait_for(small, 1)
    assert large.cancelled() and host.queue_depth == 0
    assert host.used_bytes == (1 + 4 + 1) * PAGE_BYTES


async def test_room_made_in_the_very_moment_of_giving_up_is_not_lost(host: HostTier) -> None:
    everything = await host.allocate(PAGES * PAGE_BYTES)
    first, second = waiting(host, PAGES), waiting(host, PAGES)
    await turn()
    first.cancel()
    host.free(everything)
    granted = await asyncio.wait_for(second, 1)
    assert first.cancelled() and granted and host.queue_depth == 0


async def test_a_grant_that_nobody_wants_any_more_is_freed(host: HostTier) -> None:
    everything = await host.allocate(PAGES * PAGE_BYTES)
    first = waiting(host, PAGES)
    await turn()
    host.free(everything)
    first.cancel()
    await asyncio.wait([first])
    assert host.used_bytes == PAGE_BYTES


async def test_prefetches_go_on_when_the_last_waiter_gives_up(host: HostTier) -> None:
    await host.allocate(4 * PAGE_BYTES)
    large = waiting(host, 6)
    await turn()
    pumped = []
    host.when_room_is_made(lambda: pumped.append(host.try_allocate(PAGE_BYTES, later_than=0.0)))
    large.cancel()
    await asyncio.wait([large])
    assert any(pumped)


async def test_a_waiter_whose_deadline_passes_is_told_the_figures_and_those_behind_it_go_on() -> None:
    order = EvictionOrder()
    host = HostTier((PAGES + 1) * PAGE_BYTES, order, lambda: None, admission_timeout_seconds=0.1)
    host_cache = HostCache(host, order)
    used = resident(host, host_cache, "used", pages=5)
    assert used.copy is not None
    host_cache.pin(used.copy)
    large = waiting(host, 4)
    await turn()
    # The small request is behind the large one in the queue, and has a later deadline.
    await asyncio.sleep(0.05)
    small = waiting(host, 1)
    with pytest.raises(BudgetExceededError) as caught:
        await large
    told = str(caught.value)
    assert (
        f"host_budget {shown_size((PAGES + 1) * PAGE_BYTES)} had no room for {shown_size(4 * PAGE_BYTES)} for 0.1 s"
        in told
    )
    assert (
        f"{shown_size(6 * PAGE_BYTES)} are used, {shown_size(5 * PAGE_BYTES)} of them by copies that are leased" in told
    )
    assert "raise host_budget or admission_timeout_seconds" in told
    await small
    assert host.queue_depth == 0 and host.used_bytes == 7 * PAGE_BYTES
    host_cache.unpin(used, used.copy)
    await waiting(host, 4)
    host.arena.close()


async def test_a_stream_of_small_requests_does_not_make_a_large_one_miss_its_deadline() -> None:
    host = HostTier((PAGES + 1) * PAGE_BYTES, EvictionOrder(), lambda: None, admission_timeout_seconds=20.0)
    pages = [await host.allocate(PAGE_BYTES) for _ in range(PAGES)]
    large = waiting(host, PAGES)
    await turn()
    small: list[asyncio.Task[ArenaRange]] = []
    while not large.done():
        # Each page that is freed would be enough for one more small request.
        small.append(waiting(host, 1))
        host.free(pages.pop())
        await turn()
    assert not any(task.done() for task in small) and len(small) == PAGES
    host.free(large.result())
    for task in small:
        host.free(await task)
    assert host.used_bytes == PAGE_BYTES
    host.arena.close()


async def test_a_waiter_cancelled_as_its_deadline_passes_leaves_nothing_behind() -> None:
    host = HostTier((PAGES + 1) * PAGE_BYTES, EvictionOrder(), lambda: None, admission_timeout_seconds=0.01)
    everything = await host.allocate(PAGES * PAGE_BYTES)
    for wait_seconds in (0.008, 0.009, 0.01, 0.011, 0.012):
        task = waiting(host, 1)
        await asyncio.sleep(wait_seconds)
        task.cancel()
        await asyncio.wait([task])
        assert host.queue_depth == 0
    host.free(everything)
    assert host.used_bytes == PAGE_BYTES
    host.arena.close()


async def test_stagings_and_gradients_that_find_no_room_are_refused_and_leave_nothing_half_done(tmp_path: Path) -> None:
    layout = Layout(groups=("block",))
    async with opened(tmp_path, admission_timeout_seconds=0.05) as engine:
        training = await Training(engine, layout).open(must_exist=False)
        filler = await engine.host.allocate(engine.host.budget_bytes - engine.host.used_bytes)
        for attempt in (
            engine.pins.stage(training.job, "block", Kind.PARAM),
            engine.pending_steps.allocate_gradient(training.job, "block"),
        ):
            with pytest.raises(BudgetExceededError, match=r"had no room for [\d.]+ [KM]iB for 0\.05 s"):
                await attempt
        assert engine.scratch.nbytes == 0 and engine.host.queue_depth == 0
        engine.host.free(filler)
        await training.stage_all()
        await training.commit(0)
        await training.step()
        await training.assert_at(1)


async def test_what_can_never_fit_is_refused_with_the_figure_that_would_do(host: HostTier) -> None:
    with pytest.raises(BudgetExceededError, match="raise host_budget to more than 1MiB"):
        await host.allocate(PAGES * PAGE_BYTES + 1)


def resident(host: HostTier, host_cache: HostCache, name: str, pages: int = 2) -> Slab:
    """Return a slab with a clean, unpinned copy of its newest bytes."""
    spec = SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=TierName.NVME)
    slab = Slab(SlabKey("job", name, Kind.PARAM), spec, pages * PAGE_BYTES // 4, backing=TierName.NVME)
    slab.latest = 3
    range_ = host.arena.allocate(slab.nbytes)
    assert range_ is not None
    slab.copy = HostCopy(range_, step=3, at_home=False)
    host_cache.pin(slab.copy)
    host_cache.unpin(slab, slab.copy)
    return slab


async def test_the_copy_whose_next_use_is_farthest_goes_first(host: HostTier, order: EvictionOrder) -> None:
    host_cache = HostCache(host, order)
    slabs = {name: resident(host, host_cache, name) for name in ("soon", "never", "late", "later")}
    for name, position in (("soon", 1.0), ("late", 7.0), ("later", 9.0)):
        host_cache.set_next_use(slabs[name], position)
    for gone in ("never", "later", "late", "soon"):
        await host.allocate(2 * PAGE_BYTES)
        assert slabs.pop(gone).copy is None
        assert all(slab.copy is not None for slab in slabs.values())
    assert host.counters.demotions == 4


async def test_a_prefetch_displaces_only_what_is_needed_later_than_itself(host: HostTier, order: EvictionOrder) -> None:
    host_cache = HostCache(host, order)
    for index in range(4):
        host_cache.set_next_use(resident(host, host_cache, str(index)), float(index))
    assert host.try_allocate(2 * PAGE_BYTES, later_than=3.0) is None
    assert host.try_allocate(2 * PAGE_BYTES, later_than=2.5) is not None
    assert host.try_allocate(2 * PAGE_BYTES, later_than=2.5) is None


async def test_a_copy_in_use_is_never_freed_and_one_out_of_date_goes_with_its_last_user(
    host: HostTier, order: EvictionOrder
) -> None:
    host_cache = HostCache(host, order)
    slab = resident(host, host_cache, "used", pages=PAGES)
    copy = slab.copy
    assert copy is not None
    host_cache.pin(copy)
    host_cache.pin(copy)
    assert host_cache.leased_bytes == PAGES * PAGE_BYTES and host_cache.evictable_bytes == 0
    other = waiting(host, 1)
    host_cache.free_copy(slab)
    host_cache.unpin(slab, copy)
    await turn()
    assert not other.done()
    host_cache.unpin(slab, copy)
    await asyncio.wait_for(other, 1)
    assert host_cache.leased_bytes == 0 and slab.copy is None and host.used_bytes == 2 * PAGE_BYTES


async def test_a_next_use_named_on_return_is_kept(host: HostTier, order: EvictionOrder) -> None:
    host_cache = HostCache(host, order)
    first, second = (resident(host, host_cache, name, pages=4) for name in ("first", "second"))
    for slab, position in ((first, 5.0), (second, NEVER)):
        assert slab.copy is not None
        host_cache.pin(slab.copy)
        host_cache.unpin(slab, slab.copy, position)
    await host.allocate(1)
    assert first.copy is not None and second.copy is None


async def test_a_range_is_cleared_to_its_last_byte_and_no_further(order: EvictionOrder) -> None:
    tier = HostTier(3 << 20, order, lambda: None)
    ranges = [await tier.allocate(nbytes) for nbytes in (PAGE_BYTES, (1 << 20) + 1, PAGE_BYTES)]
    for each in ranges:
        tier.view(each)[:] = b"x" * each.nbytes
    await tier.clear(ranges[1])
    assert [bytes(tier.view(each)).strip(b"x") == b"" for each in ranges] == [True, False, True]
    assert not any(tier.view(ranges[1]))
    tier.arena.close()
