"""Updates of bytes in host memory whose results wait beside them for the seal of their step."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from storage.base.shard import DType, Kind, TierName
from storage.steps.tile import UpdateTile
from tests.unit.storage.builders import MIB, Layout, Training, opened, room_taken, updating

LAYOUT = Layout(name="shadowed", groups=("a", "b", "c"), weights=TierName.HOST, moments=TierName.HOST, every_steps=0)
IN_EACH_PRECISION = pytest.mark.parametrize("precision", [DType.FLOAT32, DType.BFLOAT16])


async def results_wait(training: Training, groups: int = 3) -> None:
    """Wait until the results of so many groups wait for the seal."""
    shadows = training.engine.shadows
    async with asyncio.timeout(10):
        while shadows.waiting != groups:
            await asyncio.sleep(0.001)


@IN_EACH_PRECISION
async def test_results_replace_the_old_bytes_at_the_seal_bit_for_bit(precision: DType, tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, replace(LAYOUT, precision=precision)).begin()
        for step in range(1, 4):
            await training.hand_over(aside=True)
            await results_wait(training)
            await training.assert_at(step - 1, as_of=step - 1)
            await training.commit(step)
            assert engine.shadows.nbytes == 0
            await training.assert_at(step)


async def test_a_snapshot_of_the_step_before_has_its_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, replace(LAYOUT, every_steps=2)).begin()
        for step in range(1, 6):
            await training.hand_over(aside=True)
            await training.commit(step)
        await training.assert_at(5)
        assert training.job.snapshot is not None
        await asyncio.wait([training.job.snapshot])
        await training.engine.roll_back(training.job, 4)
        await training.assert_at(4)


async def test_a_step_that_is_abandoned_leaves_the_last_one_whole(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        await training.hand_over(aside=True)
        await results_wait(training)
        await engine.pending_steps.abandon(training.job)
        assert engine.shadows.nbytes == 0
        await training.assert_at(1)
        await training.hand_over(aside=True)
        await training.commit(2)
        await training.assert_at(2)


async def test_only_what_is_withdrawn_is_undone(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over(aside=True)
        await results_wait(training)
        await engine.pending_steps.withdraw(training.job, 1, "b")
        assert training.engine.shadows.waiting == 2
        await training.hand_over(["b"])
        await training.commit(1)
        await training.assert_at(1)


async def test_results_give_way_to_an_allocation_and_are_computed_again(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over(aside=True)
        await results_wait(training)
        with room_taken(engine):
            range_ = await engine.host.allocate(1)
            assert engine.shadows.waiting == 2, "no more are discarded than the allocation needs"
            engine.host.free(range_)
        await training.commit(1)
        await training.assert_at(1)


async def test_results_give_way_to_an_activation(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over(["a", "b"], aside=True)
        await results_wait(training, 2)
        with room_taken(engine):
            activation = await engine.gradients.allocate_activation("shadowed", "session", 1)
            assert engine.shadows.waiting == 1, "no more are discarded than the activation needs"
            waiting = asyncio.ensure_future(engine.gradients.allocate_activation("shadowed", "session", 16 * MIB))
            await asyncio.sleep(0)
            assert engine.shadows.waiting == 0
        with room_taken(engine):
            pass
        engine.gradients.free(await waiting)
        engine.gradients.free(activation)
        await training.hand_over(["c"])
        await training.commit(1)
        await training.assert_at(1)


async def test_no_results_are_kept_in_room_for_which_an_activation_waits(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        ballast = await engine.host.allocate(16 * MIB)
        waiting = asyncio.ensure_future(engine.gradients.allocate_activation("shadowed", "session", 16 * MIB))
        await asyncio.sleep(0)
        await training.hand_over(aside=True)
        await asyncio.sleep(0.05)
        assert engine.shadows.nbytes == 0 and not waiting.done()
        engine.host.free(ballast)
        engine.gradients.free(await waiting)
        await training.commit(1)
        await training.assert_at(1)


async def test_results_of_a_group_that_goes_to_nvme_meanwhile_are_computed_again(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, replace(LAYOUT, every_steps=1000)).begin()
        # Only bytes that are on NVMe, too, may get another place.
        assert training.job.snapshot is not None
        await asyncio.wait([training.job.snapshot])
        await training.hand_over(aside=True)
        await results_wait(training)
        elsewhere = replace(training.layout, weights=TierName.NVME, moments=TierName.NVME)
        await engine.register(training.job, [elsewhere.group(name) for name in elsewhere.groups])
        await training.commit(1)
        assert all(1 in slab.versions for slab in training.job.slabs())
        await training.assert_at(1)


async def test_results_that_are_still_written_give_way_afterwards(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        async with updating(training, ["a"], aside=True) as go_on:
            with room_taken(engine):
                allocation = asyncio.ensure_future(engine.host.allocate(1))
                await asyncio.sleep(0.05)
                assert not allocation.done() and engine.shadows.nbytes > 0
                go_on.set()
                engine.host.free(await allocation)
        await training.hand_over(["b", "c"])
        await training.commit(1)
        await training.assert_at(1)


async def test_without_room_the_update_waits_for_the_seal(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        with room_taken(engine):
            pass
        gradients = sum(group.gradient_bytes for group in training.job.groups.values())
        held = [await engine.host.allocate(gradients)]
        while range_ := engine.host.allocate_free(64 << 10):
            held.append(range_)
        engine.host.free(held.pop(0))
        await training.hand_over(aside=True)
        await asyncio.sleep(0.05)
        assert engine.shadows.nbytes == 0
        for range_ in held:
            engine.host.free(range_)
        await training.commit(1)
        await training.assert_at(1)


async def test_steps_keep_the_room_that_they_need(tmp_path: Path) -> None:
    """The room of a gradient is not taken, even if no gradient is there now."""
    async with opened(tmp_path, host_budget_bytes=64 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        spare = engine.shadows.spare_bytes
        needed = sum(slab.paged_bytes for slab in training.job.slabs())
        assert needed < spare < 64 * MIB - needed
        await training.hand_over(aside=True)
        await results_wait(training)
        assert engine.shadows.spare_bytes == spare - needed


async def test_a_reader_of_the_old_bytes_keeps_them(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over(aside=True)
        await results_wait(training)
        pin = await engine.pins.fetch(training.job, "a", Kind.PARAM, as_of=0)
        before = engine.host.tensor(pin.arena_range, DType.FLOAT32, pin.slab.numel).clone()
        await training.commit(1)
        assert (engine.host.tensor(pin.arena_range, DType.FLOAT32, pin.slab.numel) == before).all()
        await training.assert_at(1)
        engine.pins.unpin(pin)


async def test_a_kernel_that_fails_costs_no_byte_of_the_last_step(tmp_path: Path) -> None:
    begun = threading.Event()

    def broken(tile: UpdateTile) -> None:
        begun.set()
        raise ArithmeticError("planted")

    async with opened(tmp_path, host_budget_bytes=32 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over(["a"], wrap=lambda _: broken, aside=True)
        await asyncio.to_thread(begun.wait)
        with pytest.raises(ArithmeticError, match="planted"):
            await training.commit(1)
        await engine.pending_steps.abandon(training.job)
        await training.assert_at(0)
        await training.hand_over(aside=True)
        await training.commit(1)
        await training.assert_at(1)


async def test_what_has_not_begun_at_the_seal_is_updated_in_place(tmp_path: Path) -> None:
    """The update in place takes less of the processor, and nothing is left to hide it under."""
    layout = replace(LAYOUT, groups=tuple("abcdefgh"))
    async with opened(tmp_path, host_budget_bytes=64 * MIB) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        places = {slab: slab.copy and slab.copy.arena_range for slab in training.job.slabs()}
        async with updating(training, aside=True) as go_on:
            # The kernels are held up, so further groups begin only as long as there are tile buffers, of which there
            # are four.
            commit = asyncio.ensure_future(training.commit(2))
            await asyncio.sleep(0.05)
            go_on.set()
            await commit
        await training.assert_at(2)
        moved = {slab.key.group for slab, place in places.items() if slab.copy and slab.copy.arena_range is not place}
        assert "a" in moved
        assert "h" not in moved
