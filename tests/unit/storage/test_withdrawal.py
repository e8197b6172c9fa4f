"""Updates that are undone before their step is committed, and reads as of the step before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from storage.base.errors import ConflictError, StepAbortedError
from storage.base.shard import DType, Kind, TierName
from storage.steps.tile import Kernel, UpdateTile
from tests.unit.storage.builders import (
    Layout,
    Training,
    held,
    held_up,
    late_reads,
    opened,
    quiesce,
    updating,
    waiting_for,
)

LAYOUT = Layout(name="withdrawn", groups=("a", "b", "c"))
PLACES = [(TierName.NVME, TierName.NVME), (TierName.HOST, TierName.HOST), (TierName.HOST, TierName.NVME)]
LAYOUTS = [
    replace(LAYOUT, weights=weights, moments=moments, precision=precision)
    for weights, moments in PLACES
    for precision in (DType.FLOAT32, DType.BFLOAT16)
]
IN_EACH_LAYOUT = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda it: f"{it.weights.value}-{it.moments.value}-{it.precision.value}"
)


@IN_EACH_LAYOUT
async def test_what_was_updated_is_undone_and_can_be_updated_again(layout: Layout, tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await training.hand_over()
        await training.finish_updates()
        for group in layout.groups:
            await engine.pending_steps.withdraw(training.job, 2, group)
        await training.assert_goes_on_from(1)
        await training.step()
        await training.assert_at(3)


@IN_EACH_LAYOUT
async def test_only_what_is_withdrawn_is_undone(layout: Layout, tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        await training.hand_over()
        await training.finish_updates()
        await engine.pending_steps.withdraw(training.job, 1, "b")
        await training.hand_over(["b"])
        await training.commit(1)
        await training.assert_at(1)


@IN_EACH_LAYOUT
async def test_an_update_is_withdrawn_while_it_runs(layout: Layout, tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        async with updating(training) as go_on:
            withdrawals = [
                asyncio.ensure_future(engine.pending_steps.withdraw(training.job, 1, g)) for g in layout.groups
            ]
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(*withdrawals)
        await training.assert_goes_on_from(0)


@IN_EACH_LAYOUT
async def test_the_step_is_abandoned_while_an_update_is_withdrawn(layout: Layout, tmp_path: Path) -> None:
    """Both stop the same update, which undoes its work once."""
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        async with updating(training) as go_on:
            ends = [
                asyncio.ensure_future(engine.pending_steps.withdraw(training.job, 1, group)) for group in layout.groups
            ]
            await asyncio.sleep(0.01)
            ends.append(asyncio.ensure_future(engine.pending_steps.abandon(training.job)))
            await asyncio.sleep(0.05)
            assert not ends[0].done() and not ends[-1].done(), "a kernel still works on a tile of group a"
            go_on.set()
            await asyncio.gather(*ends)
        await training.assert_goes_on_from(0)


@IN_EACH_LAYOUT
async def test_a_read_that_is_overtaken_by_an_update_sees_the_step_that_it_asked_for(
    layout: Layout, tmp_path: Path
) -> None:
    """The update begins and ends while the old bytes are being read from the device."""
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
        with late_reads(engine) as overtaken:
            reading = asyncio.ensure_future(engine.pins.fetch(training.job, "a", Kind.PARAM, as_of=0))
            await asyncio.sleep(0.05)
        await training.hand_over(["b", "c"])
        if layout.weights is TierName.NVME:
            # With weights at home in host memory this is left out, because updates in place wait for the readers.
            await training.hand_over(["a"])
            await training.finish_updates()
        overtaken.set()
        pin = await reading
        assert (pin.copy.step or 0) == 0
        engine.pins.unpin(pin)


async def test_a_fetch_that_outlives_the_withdrawal_of_an_update_returns_the_one_that_was_made_again(
    tmp_path: Path,
) -> None:
    """Both updates are of the same step, so the step does not say which of them was read."""

    def other(kernel: Kernel) -> Kernel:
        def compute(tile: UpdateTile) -> None:
            kernel(tile)
            for state in tile.tensors.values():
                state.fill_(7.0)

        return compute

    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over(["a"], wrap=other)
        await training.finish_updates()
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
        with late_reads(engine) as made_again:
            reading = asyncio.ensure_future(engine.pins.fetch(training.job, "a", Kind.PARAM))
            await asyncio.sleep(0.05)
        await engine.pending_steps.withdraw(training.job, 1, "a")
        await training.hand_over()
        await training.commit(1)
        made_again.set()
        pin = await reading
        expected = training.reference.states(1)["a", "a.weight.0", Kind.PARAM]
        assert torch.equal(engine.host.tensor(pin.arena_range, DType.FLOAT32, len(expected)), expected)
        engine.pins.unpin(pin)
        await training.assert_at(1)


async def test_a_step_whose_update_is_being_withdrawn_is_not_committed(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        async with updating(training) as go_on:
            withdrawal = asyncio.ensure_future(engine.pending_steps.withdraw(training.job, 1, "a"))
            await asyncio.sleep(0)
            commit = asyncio.ensure_future(training.commit(1))
            await asyncio.sleep(0.01)
            go_on.set()
            with pytest.raises(StepAbortedError):
                await commit
            await withdrawal
        await engine.pending_steps.abandon(training.job)
        await training.assert_goes_on_from(0)


async def test_a_withdrawal_that_ends_while_the_commit_waits_for_a_snapshot_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, replace(LAYOUT, every_steps=2)).begin()
        job = training.job
        await quiesce(engine)
        await training.step()
        with held(monkeypatch, "sync_data") as snapshot_goes_on:
            await training.step()
            await training.step()
            async with updating(training) as go_on:
                assert job.pending is not None
                write = job.pending.writes[job.slab("a", Kind.PARAM)]
                withdrawal = asyncio.ensure_future(engine.pending_steps.withdraw(job, 4, "a"))
                await asyncio.sleep(0.01)
                commit = asyncio.ensure_future(training.commit(4))
                await asyncio.sleep(0.01)
                go_on.set()
                await asyncio.wait([write])
                await asyncio.sleep(0.01)
                snapshot_goes_on.set()
                with pytest.raises(StepAbortedError):
                    await commit
                await withdrawal
        await engine.pending_steps.abandon(job)
        await training.assert_goes_on_from(3)


async def test_a_withdrawal_that_comes_too_late_for_the_commit_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over()
        await training.finish_updates()
        # The withdrawal cannot stop a write that is done, and the commit begins before the withdrawal goes on.
        withdrawal = asyncio.ensure_future(engine.pending_steps._withdraw(training.job, 1, "a"))
        commit = asyncio.ensure_future(engine.pending_steps.commit(training.job, 1, {0: b"1"}, 1))
        with pytest.raises(ConflictError, match="step 1 was committed while group 'a' was being withdrawn"):
            await withdrawal
        assert await commit
        await training.assert_at(1)


async def test_a_withdrawal_does_not_free_bytes_that_a_commit_in_doubt_may_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over()
        await training.finish_updates()
        # The catalog is left as a commit of step 1 leaves it whose sync fails.
        engine._catalog.in_doubt = True
        await engine.pending_steps.withdraw(training.job, 1, "a")
        assert not engine._catalog.in_doubt
        await training.hand_over(["a"])
        await training.commit(1)
        await training.assert_at(1)


async def test_bytes_of_host_memory_alone_that_a_commit_has_replaced_are_not_made_up(tmp_path: Path) -> None:
    """Once zeros, or the bytes of the last snapshot, were returned as those of the last committed step."""
    layout = replace(LAYOUT, weights=TierName.HOST, moments=TierName.HOST, every_steps=0)
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        with held_up() as (begun, go_on):
            await training.hand_over(["a"])
            await training.hand_over(["b", "c"], wrap=lambda kernel: waiting_for(begun, go_on, kernel))
            commit = asyncio.ensure_future(training.commit(1))
            await asyncio.to_thread(begun.wait)
            slab = training.job.slab("a", Kind.PARAM)
            async with asyncio.timeout(10):
                while slab.latest != 1:
                    await asyncio.sleep(0.001)
            with pytest.raises(ConflictError, match="read it as of step 1"):
                await engine.pins.fetch(training.job, "a", Kind.PARAM, as_of=0)
            go_on.set()
            await commit
        await training.assert_at(1)


async def test_after_a_restart_nothing_of_a_withdrawn_update_is_there(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over()
        await training.finish_updates()
        await engine.pending_steps.withdraw(training.job, 1, "a")
        await training.commit(1)
        used = engine.nvme.used_bytes
    async with opened(tmp_path) as engine:
        assert engine.nvme.used_bytes <= used
        training = Training(engine, LAYOUT)
        await training.open()
        for group, step in (("a", 0), ("b", 1)):
            pin = await engine.pins.fetch(training.job, group, Kind.PARAM)
            assert pin.copy.step == step
            engine.pins.unpin(pin)


async def test_what_was_not_updated_is_left_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await engine.pending_steps.withdraw(training.job, 1, "a")
        await training.assert_at(0)
        with pytest.raises(ConflictError, match="step 0 cannot be prepared, the next one is 1"):
            await engine.pending_steps.withdraw(training.job, 0, "a")


@IN_EACH_LAYOUT
async def test_reads_as_of_the_last_step_see_nothing_of_the_next(layout: Layout, tmp_path: Path) -> None:
    async def version(as_of: int | None) -> int | None:
        pin = await engine.pins.fetch(training.job, "a", Kind.PARAM, as_of=as_of)
        try:
            expected = training.reference.states(pin.copy.step or 0)["a", "a.weight.0", Kind.PARAM]
            stored = engine.host.tensor(pin.arena_range, layout.dtype(Kind.PARAM), len(expected))
            assert bool((stored == expected).all())
            return pin.copy.step
        finally:
            engine.pins.unpin(pin)

    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        async with updating(training) as go_on:
            # Slabs at home in host memory are being updated in place, so the read gets their old bytes from NVMe.
            assert await version(as_of=0) == 0
            go_on.set()
            await training.finish_updates()
        assert await version(as_of=0) == 0
        assert await version(as_of=1) == 1
        assert await version(as_of=None) == 1
        await training.commit(1)
        assert await version(as_of=1) == 1


async def test_an_update_in_host_memory_only_does_not_keep_readers_of_the_last_step(tmp_path: Path) -> None:
    """The update in place begins only when the step is sealed, so readers of the last step can go on until then."""
    layout = replace(LAYOUT, weights=TierName.HOST, moments=TierName.HOST, every_steps=0)
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        await training.hand_over()
        pin = await engine.pins.fetch(training.job, "a", Kind.PARAM, as_of=0)
        assert pin.copy.step == 0
        engine.pins.unpin(pin)
        await engine.pending_steps.withdraw(training.job, 1, "b")
        await training.hand_over(["b"])
        await training.commit(1)
        await training.assert_at(1)
