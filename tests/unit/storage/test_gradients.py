"""Gradients that do not fit into the arena: parked, spilled, read back, freed, and damaged on their way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from storage.base.errors import BudgetExceededError, DamagedBlockError, DeviceError, NotFoundError
from storage.base.shard import DType, TierName
from storage.base.shown_sizes import shown_size
from storage.engine import Engine
from storage.jobs.accounts import Holder
from storage.memory.parkable import Gradient
from tests.unit.storage.builders import (
    MIB,
    ROOM_FOR_TILED,
    TILED,
    Layout,
    Training,
    flip,
    held,
    on_nvme,
    opened,
    updating,
)

LAYOUT = Layout(name="spilled", numels=TILED, groups=("a", "b", "c"))
PLACES = [(TierName.NVME, TierName.NVME), (TierName.HOST, TierName.HOST), (TierName.HOST, TierName.NVME)]
LAYOUTS = [
    replace(LAYOUT, weights=weights, moments=moments, precision=precision, every_steps=every_steps)
    for weights, moments in PLACES
    for precision in (DType.FLOAT32, DType.BFLOAT16)
    for every_steps in (1, 2)
]
IN_EACH_LAYOUT = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda it: f"{it.weights.value}-{it.moments.value}-{it.precision.value}-{it.every_steps}"
)
ROOM = {"host_budget_bytes": 32 * MIB, "nvme_budget_bytes": 128 * MIB}

# A function that returns the context of a step of a layout, with these budgets.
Crowded = Callable[..., AbstractAsyncContextManager[Training]]


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crowded:
    """Return a function that begins a step at an engine without room for parked gradients.

    The smallest host budget leaves an engine like that.
    """

    @asynccontextmanager
    async def begun(layout: Layout = LAYOUT, room: Mapping[str, int] = ROOM) -> AsyncIterator[Training]:
        async with opened(tmp_path, **room) as engine:
            training = await Training(engine, layout).begin()
            monkeypatch.setattr(engine.gradients, "_room", lambda: 0)
            yield training

    return begun


def spilling(engine: Engine) -> Callable[[Gradient], Awaitable[None]]:
    """Return a function that parks a gradient and waits until it is spilled."""

    async def spill(gradient: Gradient) -> None:
        engine.gradients.park(gradient)
        await engine.gradients.close()
        assert gradient.arena_range is None and gradient.region is not None

    return spill


async def filled(training: Training, group: str = "a") -> tuple[Gradient, torch.Tensor]:
    """Return a gradient with random values, and the values."""
    gradient = await training.engine.pending_steps.allocate_gradient(training.job, group)
    values = training.engine.gradients.tensor(gradient).copy_(torch.randn(gradient.numel))
    return gradient, values.clone()


@asynccontextmanager
async def being_read(
    training: Training, *, is_last_use: bool = False
) -> AsyncIterator[tuple[Gradient, threading.Event]]:
    """Yield the gradient of the only group while its update reads it, and the event that lets the update go on."""
    gradients: list[Gradient] = []

    async def note(gradient: Gradient) -> None:
        gradients.append(gradient)

    async with updating(training, before_update=note, is_last_use=is_last_use) as go_on:
        (gradient,) = gradients
        yield gradient, go_on


@IN_EACH_LAYOUT
async def test_updates_with_spilled_gradients_have_the_bits_of_torch(layout: Layout, crowded: Crowded) -> None:
    async with crowded(layout) as training:
        engine = training.engine
        for step in (1, 2, 3):
            await training.hand_over(before_update=spilling(engine))
            await training.commit(step)
            assert engine.gradients.spilled_bytes == 0
        await training.assert_at(3)


async def test_a_budget_that_holds_one_gradient_trains_any_number_of_groups(tmp_path: Path) -> None:
    """All gradients of a step are there before the first update, as with clipping by norm."""
    spilled = []
    for groups in (12, 24):
        layout = replace(LAYOUT, name=f"job {groups}", groups=tuple(f"block.{i}" for i in range(groups)))
        room = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 512 * MIB, "gradients_of_a_rank": 1}
        async with opened(tmp_path / str(groups), **room) as engine:
            training = await Training(engine, layout).begin()
            assert engine.admission.must_park(training.job)
            for step in (1, 2):
                gradients = []
                for group in layout.groups:
                    gradient, values = await filled(training, group)
                    engine.gradients.park(gradient)
                    gradients.append((gradient, values))
                spilled.append(engine.gradients.spilled_bytes)
                assert engine.host.used_bytes <= engine.host.budget_bytes
                for gradient, values in reversed(gradients):
                    await engine.gradients.recall(gradient)
                    assert torch.equal(engine.gradients.tensor(gradient), values)
                    engine.gradients.free(gradient)
                await training.hand_over()
                await training.commit(step)
            await training.assert_at(2)
    assert spilled[2] > spilled[0]


async def test_gradients_that_fit_are_not_spilled(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM) as engine:
        training = await Training(engine, LAYOUT).begin()
        assert not engine.admission.must_park(training.job)
        written = engine.nvme.counters.bytes_written
        gradients = [(await filled(training, group))[0] for group in LAYOUT.groups]
        for gradient in gradients:
            engine.gradients.park(gradient)
        await engine.gradients.close()
        assert engine.nvme.counters.bytes_written == written
        assert engine.gradients.parked_bytes == sum(gradient.nbytes for gradient in gradients)
        for gradient in gradients:
            engine.gradients.free(gradient)


async def test_a_job_is_to_park_only_while_other_jobs_take_the_room(tmp_path: Path) -> None:
    """The engine keeps the need of all jobs until one of them is registered, ends, comes back or is deleted."""
    room = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 512 * MIB, "gradients_of_a_rank": 1}
    other = replace(LAYOUT, name="other", groups=tuple(f"block.{i}" for i in range(12)))
    async with opened(tmp_path, **room) as engine:
        small = await Training(engine, replace(LAYOUT, name="small", groups=("a",))).begin()
        assert not engine.admission.must_park(small.job)
        alone = engine.gradients._room()
        large = await Training(engine, other).begin()
        assert engine.admission.must_park(small.job) and engine.gradients._room() < alone
        await engine.end_run(large.job)
        assert not engine.admission.must_park(small.job) and engine.gradients._room() == alone
        await large.open()
        assert engine.admission.must_park(small.job) and engine.gradients._room() < alone
        await engine.delete_job(other.name)
        assert not engine.admission.must_park(small.job) and engine.gradients._room() == alone


async def test_a_spilled_gradient_is_recalled_changed_and_spilled_again(crowded: Crowded) -> None:
    async with crowded() as training:
        engine = training.engine
        gradient, values = await filled(training)
        for _ in range(3):
            await spilling(engine)(gradient)
            await engine.gradients.recall(gradient)
            assert engine.gradients.spilled_bytes == 0
            engine.gradients.tensor(gradient).add_(1.0)
            values += 1.0
            assert torch.equal(engine.gradients.tensor(gradient), values)
        engine.gradients.free(gradient)


async def test_a_gradient_is_recalled_or_freed_while_it_is_spilled(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowded() as training:
        engine = training.engine
        gradient, values = await filled(training)
        freed, _ = await filled(training, "b")
        with held(monkeypatch, "write_exact") as go_on:
            engine.gradients.park(gradient)
            engine.gradients.park(freed)
            recalling = asyncio.ensure_future(engine.gradients.recall(gradient))
            await asyncio.sleep(0.02)
            engine.gradients.free(freed)
            assert not recalling.done()
            go_on.set()
            await recalling
        assert torch.equal(engine.gradients.tensor(gradient), values)
        await spilling(engine)(gradient)
        with held(monkeypatch, "read_exact") as go_on:
            recalling = asyncio.ensure_future(engine.gradients.recall(gradient))
            await asyncio.sleep(0.02)
            engine.gradients.free(gradient)
            go_on.set()
            with pytest.raises(NotFoundError, match="is freed: its lease has ended"):
                await recalling


async def test_a_range_may_be_taken_before_its_spill_has_begun(crowded: Crowded) -> None:
    """A client parks and recalls a gradient, and its session ends, before the task of the spill has had a turn."""
    async with crowded() as training:
        engine = training.engine
        used = engine.nvme.used_bytes
        gradient, _ = await filled(training)
        engine.gradients.park(gradient)
        recalling = asyncio.ensure_future(engine.gradients.recall(gradient))
        range_ = engine.gradients.take_range(gradient)
        assert range_ is not None
        with pytest.raises(NotFoundError, match="is freed"):
            await recalling
        async with asyncio.timeout(10):
            await engine.gradients.close()
        engine.host.free(range_)
        assert engine.gradients.parked_bytes == engine.gradients.spilled_bytes == 0
        assert engine.nvme.used_bytes == used


async def test_a_recall_that_is_cancelled_when_the_spill_has_ended_leaves_the_gradient_spilled(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowded() as training:
        engine = training.engine
        gradient, values = await filled(training)
        used = engine.nvme.used_bytes
        with held(monkeypatch, "write_exact") as go_on:
            engine.gradients.park(gradient)
            recalling = asyncio.ensure_future(engine.gradients.recall(gradient))
            await asyncio.sleep(0.02)
            go_on.set()
            while gradient.region is None:
                await asyncio.sleep(0)
        # The spill has ended, and the recall that waits for it has not run since.
        recalling.cancel()
        await asyncio.wait([recalling])
        assert recalling.cancelled()
        await engine.gradients.close()
        assert engine.nvme.used_bytes == used + gradient.nbytes
        assert gradient.arena_range is None and gradient.is_parked
        await engine.gradients.recall(gradient)
        assert torch.equal(engine.gradients.tensor(gradient), values)
        assert engine.nvme.used_bytes == used
        engine.gradients.free(gradient)


async def test_a_recall_waits_for_a_second_spill_that_begins_when_the_first_one_has_failed(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowded() as training:
        engine = training.engine
        gradient, values = await filled(training)
        used, fails = engine.nvme.used_bytes, asyncio.Event()

        async def fail(*_: object) -> None:
            await fails.wait()
            raise DeviceError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(engine.nvme, "write_from", fail)
            engine.gradients.park(gradient)
            recalling = asyncio.ensure_future(engine.gradients.recall(gradient))
            await asyncio.sleep(0.02)
        # The client parks the gradient again before it has the answer to its recall.
        engine.gradients.park(gradient)
        (spill,) = engine.gradients._spills.values()
        # This runs before the recall that waits for the spill, too.
        spill.add_done_callback(lambda _: engine.gradients.relieve())
        fails.set()
        await recalling
        await engine.gradients.close()
        assert not gradient.is_parked and gradient.region is None and engine.nvme.used_bytes == used
        assert torch.equal(engine.gradients.tensor(gradient), values)
        engine.gradients.free(gradient)


async def test_a_gradient_is_spilled_while_its_update_reads_it(crowded: Crowded) -> None:
    async with crowded(replace(LAYOUT, groups=("a",)), ROOM_FOR_TILED) as training:
        engine = training.engine
        async with being_read(training) as (gradient, go_on):
            engine.gradients.park(gradient)
            await engine.gradients.close()
            assert gradient.region is None, "an update frees its gradient soon, so nothing but a shortage spills it"
            shortage = asyncio.ensure_future(engine.host.allocate(13 * MIB))
            await asyncio.sleep(0)
            await engine.gradients.close()
            assert gradient.region is not None and gradient.arena_range is not None
            go_on.set()
            engine.host.free(await shortage)
        await training.commit(1)
        await training.assert_at(1)


@IN_EACH_LAYOUT
async def test_an_update_with_a_spilled_gradient_is_withdrawn_and_made_again(layout: Layout, crowded: Crowded) -> None:
    """A withdrawal leaves the gradient as it was, so another rule may make the update anew."""
    async with crowded(layout) as training:
        engine = training.engine
        kept: list[Gradient] = []

        async def keep(gradient: Gradient) -> None:
            kept.append(gradient)

        real = engine.pending_steps.update
        kernels = []

        def update(job, step, group, gradient, kernel, **more):  # type: ignore[no-untyped-def]
            kernels.append((group, gradient, kernel))
            return real(job, step, group, gradient, kernel, **(more | {"keeps_gradient": True}))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.pending_steps, "update", update)
            await training.hand_over(before_update=keep)
        for gradient in kept:
            engine.gradients.park(gradient)
        await asyncio.sleep(0.05)
        await engine.gradients.close()
        for group, gradient, kernel in kernels:
            await engine.pending_steps.withdraw(training.job, 1, group)
            again = real(training.job, 1, group, gradient, kernel, keeps_gradient=True)
            engine.gradients.free_after(again, gradient)
        await training.commit(1)
        await training.assert_at(1)


@pytest.mark.parametrize("is_parked_first", [True, False])
async def test_a_gradient_whose_last_use_is_over_is_freed_and_never_written(
    crowded: Crowded, is_parked_first: bool
) -> None:
    async with crowded(replace(LAYOUT, groups=("a",)), ROOM_FOR_TILED) as training:
        engine = training.engine
        async with being_read(training, is_last_use=True) as (gradient, go_on):
            if is_parked_first:
                engine.gradients.park(gradient)
            go_on.set()
            assert gradient.update is not None
            await asyncio.wait([gradient.update])
        await asyncio.sleep(0)
        if not is_parked_first:
            # The client may still touch it.
            assert not gradient.is_freed
            engine.gradients.park(gradient)
        assert gradient.is_freed and gradient.arena_range is None and gradient.region is None
        with pytest.raises(NotFoundError, match="an update was its last use"):
            await engine.gradients.recall(gradient)
        await training.commit(1)
        await training.assert_at(1)


@pytest.mark.parametrize("patience", [60.0, 0.01])
async def test_requests_wait_for_the_last_use_of_a_gradient_before_it_is_spilled(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr("storage.memory.gradients.PATIENCE_SECONDS", patience)
    async with crowded(replace(LAYOUT, groups=("a",)), ROOM_FOR_TILED) as training:
        engine = training.engine
        async with being_read(training, is_last_use=True) as (gradient, go_on):
            engine.gradients.park(gradient)
            shortage = asyncio.ensure_future(engine.host.allocate(13 * MIB))
            await asyncio.sleep(0.05)
            await asyncio.gather(*engine.gradients._spills.values())
            assert (gradient.region is not None) == (patience < 1)
            go_on.set()
            engine.host.free(await shortage)
        assert gradient.is_freed and engine.gradients.spilled_bytes == 0
        await training.commit(1)
        await training.assert_at(1)


async def test_a_withdrawn_update_that_was_the_last_use_leaves_its_group_as_it_was(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        gradients: list[Gradient] = []

        async def park(gradient: Gradient) -> None:
            engine.gradients.park(gradient)
            gradients.append(gradient)

        await training.hand_over(before_update=park, is_last_use=True)
        for group in training.layout.groups:
            await engine.pending_steps.withdraw(training.job, 2, group)
        await training.assert_at(1)
        for gradient in gradients:
            engine.gradients.free(gradient)
        await training.step()
        await training.assert_at(2)


async def test_a_damaged_gradient_is_named_and_never_used(crowded: Crowded) -> None:
    async with crowded() as training:
        engine = training.engine
        spill = spilling(engine)

        async def damage(gradient: Gradient) -> None:
            await spill(gradient)
            if "/b/" in gradient.label:
                flip(engine, on_nvme(gradient.region).extents[0].offset + 1000)

        await training.hand_over(before_update=damage)
        with pytest.raises(
            DamagedBlockError, match=r"spilled.*/b/grad at step 1: .*\(b\.weight\.0\) on nvme are damaged"
        ):
            await training.commit(1)
        await engine.roll_back(training.job, 0)
        await training.assert_at(0)
        gradient, _ = await filled(training, "b")
        await spill(gradient)
        flip(engine, on_nvme(gradient.region).extents[0].offset + 1000)
        with pytest.raises(DamagedBlockError, match=r"b\.weight\.0"):
            await engine.gradients.recall(gradient)
        engine.gradients.free(gradient)
        await training.step()
        await training.assert_at(1)


async def test_a_spill_that_fails_ends_the_requests_that_wait_for_it_and_leaks_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM) as engine:
        training = await Training(engine, LAYOUT).begin()
        gradient, values = await filled(training)
        engine.gradients.park(gradient)
        regions = []
        with pytest.raises(BudgetExceededError):
            while True:
                regions.append(await engine.nvme.allocate(MIB // 2))
        taken = []
        with pytest.raises(BudgetExceededError, match=r"nvme_budget 128.0 MiB.*raise nvme_budget"):
            while True:
                taken.append((await filled(training))[0])
        for region in regions:
            engine.nvme.free(region)
        for each in taken:
            engine.gradients.free(each)
        await engine.gradients.recall(gradient)
        assert torch.equal(engine.gradients.tensor(gradient), values)
        engine.gradients.free(gradient)


async def test_a_job_whose_gradients_do_not_fit_needs_room_for_them_on_nvme(tmp_path: Path) -> None:
    layout = replace(LAYOUT, groups=tuple(f"block.{i}" for i in range(16)))
    room = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 1, "gradients_of_a_rank": 1}
    async with opened(tmp_path, **room) as engine:
        job = await engine.open_job(layout.job(), may_exist=True, must_exist=False)
        with pytest.raises(BudgetExceededError, match="nvme_budget 1 B is too small") as refused:
            await engine.register(job, [layout.group(name) for name in layout.groups])
    spills = sum(round(layout.group(name).numel * 4 / 4096 + 0.5) * 4096 for name in layout.groups)
    versions = 2 * 3 * spills
    assert f" {shown_size(spills + versions)} more are needed" in str(refused.value)


@IN_EACH_LAYOUT
async def test_gradients_placed_on_nvme_leave_host_memory_when_they_are_parked(layout: Layout, tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM) as engine:
        training = await Training(engine, replace(layout, gradients=TierName.NVME)).begin()
        # There is room for all of them.
        assert not engine.admission.must_park(training.job)
        for step in (1, 2):
            await training.hand_over(before_update=spilling(engine))
            await training.commit(step)
            assert engine.gradients.spilled_bytes == 0
        await training.assert_at(2)


async def test_a_gradient_placed_on_nvme_stays_in_host_memory_if_its_update_reads_it_there(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, replace(LAYOUT, groups=("a",), gradients=TierName.NVME)).begin()
        async with being_read(training) as (gradient, go_on):
            engine.gradients.park(gradient)
            assert engine.gradients.parked_bytes == gradient.nbytes
            go_on.set()
            await training.commit(1)
        await training.assert_at(1)


async def test_gradients_placed_on_nvme_need_room_there_and_little_in_host_memory(tmp_path: Path) -> None:
    """The first job places its gradients on NVMe, and then half of them, which the catalog remembers."""
    layout = replace(LAYOUT, groups=tuple(f"block.{i}" for i in range(4)), gradients=TierName.NVME)
    gradient = round(layout.group("block.0").numel * 4 / 4096 + 0.5) * 4096
    async with opened(tmp_path, **ROOM, gradients_of_a_rank=1) as engine:
        training = await Training(engine, layout).begin()
        await training.hand_over()
        await training.commit(1)
        admission = engine.admission
        need = admission._all_need()
        assert (need.gradient_bytes, need.all_gradient_bytes) == (gradient, gradient)
        reserved = admission._bytes_of_next_steps(engine.backing.durable)
        assert reserved >= 4 * gradient
        half = [
            replace(layout, gradients=TierName.HOST if number % 2 else TierName.NVME).group(name)
            for number, name in enumerate(layout.groups)
        ]
        await engine.register(training.job, half)
        need = admission._all_need()
        assert (need.gradient_bytes, need.all_gradient_bytes) == (gradient, 3 * gradient)
        assert admission._bytes_of_next_steps(engine.backing.durable) == reserved - 2 * gradient
    async with opened(tmp_path, **ROOM, gradients_of_a_rank=1) as engine:
        job = engine.jobs.job(layout.name)
        assert [job.group(name).gradient_leaves_host for name in layout.groups] == [True, False, True, False]
        assert job.tally.leaving_gradients == [gradient, gradient] and job.tally.gradients == [gradient] * 4


async def test_the_accounts_name_the_holders_of_spilled_gradients(crowded: Crowded) -> None:
    async with crowded() as training:
        engine = training.engine
        gradient, _ = await filled(training)
        await spilling(engine)(gradient)
        region = gradient.region
        assert region is not None
        _, nvme = await engine.accountant.take(spilled=lambda: [region])
        assert nvme.held_bytes[Holder.LEASES] == gradient.nbytes and nvme.is_balanced
        _, nvme = await engine.accountant.take()
        assert nvme.held_bytes[Holder.UNDER_WAY] == gradient.nbytes and nvme.unexplained_bytes == 0
        engine.gradients.free(gradient)
