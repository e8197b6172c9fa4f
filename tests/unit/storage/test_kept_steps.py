"""A kept step stays whole, bit for bit, until it is forgotten, and costs nothing while its job shares its bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from storage.base import failpoints
from storage.base.errors import (
    AlreadyExistsError,
    BudgetExceededError,
    ConflictError,
    DeviceError,
    InvalidRequestError,
    NotFoundError,
)
from storage.base.failpoints import Failpoint
from storage.base.shard import DType, TierName
from storage.base.shown_sizes import shown_size
from storage.engine import Engine
from storage.jobs.accounts import Holder
from storage.jobs.admission import Limit
from storage.state.versions import Job
from storage.tiers.base import round_up
from storage.tiers.contract import Region
from tests.unit.storage.builders import MIB, Fault, Layout, Training, opened, quiesce

LAYOUTS = {
    "nvme": Layout(precision=DType.BFLOAT16),
    "host": Layout(precision=DType.BFLOAT16, weights=TierName.HOST, moments=TierName.HOST),
    "snapshots": Layout(moments=TierName.HOST, every_steps=3),
    "memory": Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=0),
}
ROOMY = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 32 * MIB}


async def assert_kept(engine: Engine, kept: Job, layout: Layout, idle: str | None = None) -> None:
    """Check that every tensor of every kind of a kept step is that of torch; group `idle` is as in step 0."""
    training = Training(engine, layout)
    reader = await engine.step_readers.open(kept)
    try:
        for (group, fqn, kind), _ in training.reference.states(reader.step).items():
            expected = training.reference.states(0 if group == idle else reader.step)[group, fqn, kind]
            data = b"".join([piece async for piece in reader.read(fqn, kind, 0, len(expected))])
            found = torch.frombuffer(bytearray(data), dtype=layout.dtype(kind).torch)
            assert torch.equal(found, expected), f"{fqn} {kind} of step {reader.step}"
        assert reader.client_state(0) == str(reader.step).encode()
    finally:
        reader.close()


async def kept_alone(engine: Engine) -> int:
    return (await engine.accountant.take())[-1].held_bytes.get(Holder.KEPT, 0)


@pytest.mark.parametrize("name", LAYOUTS)
async def test_it_has_torchs_bits_while_training_goes_on_and_after_a_restart(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.kept_steps.keep(training.job, 1, "one", note="a note")
        for _ in range(3):
            await training.step()
        kept = await engine.kept_steps.keep(training.job, None, "four")
        assert (kept.newest, kept.spec.kept, kept.spec.note) == (4, "four", "")
        await training.step()
        await quiesce(engine)
        await training.assert_at(5)
    async with opened(tmp_path, **ROOMY) as engine:
        assert sorted(engine.jobs.kept_steps("job")) == ["four", "one"]
        assert ("job" in engine.jobs.by_name) == (name != "memory")
        for kept in engine.jobs.kept_steps("job").values():
            await assert_kept(engine, kept, layout)
        assert engine.kept_steps.find("job", "one").spec.note == "a note"
        # Nothing is left of the job once it is deleted, whether or not a commit of it was durable.
        await engine.delete_job("job")
        assert (engine.nvme.used_bytes, list(engine.jobs.kept)) == (0, [])
    async with opened(tmp_path, **ROOMY) as engine:
        assert not engine.jobs.by_name and not list(engine.jobs.kept)


async def test_keeping_copies_nothing_and_forgetting_frees_what_nothing_else_needs(tmp_path: Path) -> None:
    layout = Layout(groups=("trained", "idle"))
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        for step in (1, 2, 3):
            await training.hand_over(["trained"])
            await training.commit(step)
            written, used = engine.nvme.counters.bytes_written, engine.nvme.used_bytes
            await engine.kept_steps.keep(training.job, step, str(step))
            assert (engine.nvme.counters.bytes_written, engine.nvme.used_bytes) == (written, used)
        sizes = await engine.kept_steps.sizes("job")
        of_one_group = sum(slab.paged_bytes for slab in training.job.group("trained").slabs)
        # The job has the bytes of step 3 and of the group that no step has changed.
        assert [sizes[name].alone_bytes for name in "123"] == [of_one_group, of_one_group, 0]
        assert await kept_alone(engine) == 2 * of_one_group
        await engine.kept_steps.forget("job", "1")
        assert engine.nvme.used_bytes == used - of_one_group
    async with opened(tmp_path, **ROOMY) as engine:
        assert engine.nvme.used_bytes == used - of_one_group
        training = await Training(engine, layout).open()
        await training.hand_over(["trained", "idle"])
        await training.commit(4)
        for name in "23":
            await assert_kept(engine, engine.kept_steps.find("job", name), layout, idle="idle")
        await engine.kept_steps.forget("job", "3")
        await assert_kept(engine, engine.kept_steps.find("job", "2"), layout, idle="idle")
        reader = await engine.step_readers.open(engine.kept_steps.find("job", "2"))
        await engine.kept_steps.forget("job", "2")
        # The reader still holds the step that is forgotten.
        assert reader.nbytes > 0 and await kept_alone(engine) == 0
        reader.close()
        assert engine.nvme.used_bytes == 2 * training.version_bytes - training.version_bytes


async def test_a_roll_back_and_a_new_layout_leave_it_whole(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await training.step(settled=1)
        await engine.kept_steps.keep(training.job, 2, "two")
        await engine.roll_back(training.job, 1)
        await assert_kept(engine, engine.kept_steps.find("job", "two"), layout)
        await training.step()
        # The step has the same number and the same values as the kept one, and is another version.
        with pytest.raises(AlreadyExistsError, match="keeps step 2 under the name 'two'"):
            await engine.kept_steps.keep(training.job, 2, "two")
        again = await engine.kept_steps.keep(training.job, 2, "two again")
        await training.step()
        await assert_kept(engine, again, layout)
        await assert_kept(engine, engine.kept_steps.find("job", "two"), layout)


async def test_what_cannot_be_kept_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.kept_steps.keep(training.job, 1, "one")
        assert (await engine.kept_steps.keep(training.job, 1, "one")) is engine.kept_steps.find("job", "one")
        await training.step()
        with pytest.raises(AlreadyExistsError, match="job 'job' keeps step 1 under the name 'one'"):
            await engine.kept_steps.keep(training.job, 2, "one")
        with pytest.raises(NotFoundError, match="does not hold step 7; it holds: 2"):
            await engine.kept_steps.keep(training.job, 7, "seven")
        with pytest.raises(NotFoundError, match="keeps no step under the name 'two'"):
            await engine.kept_steps.forget("job", "two")
        with pytest.raises(InvalidRequestError, match="line feed"):
            await engine.kept_steps.keep(training.job, 2, "a\nb")
        new = await engine.open_job(Layout(name="new").job(), may_exist=True, must_exist=False)
        with pytest.raises(ConflictError, match="job 'new' has no committed step yet"):
            await engine.kept_steps.keep(new, None, "none")
        assert list(engine.jobs.kept_steps("job")) == ["one"]


@pytest.mark.parametrize("name", ["nvme", "host", "memory"])
async def test_a_step_that_does_not_fit_beside_the_next_ones_is_refused_with_the_figures(
    tmp_path: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    async with opened(tmp_path, **ROOMY) as engine:
        version_bytes = (await Training(engine, layout).begin()).version_bytes
        await engine.delete_job("job")
    # The job needs two versions on NVMe, or none with durability none.
    steps = 0 if name == "memory" else 2
    budget = round_up((steps + 2) * version_bytes, MIB)
    async with opened(tmp_path, host_budget_bytes=8 * MIB, nvme_budget_bytes=budget) as engine:
        training = await Training(engine, layout).begin()
        kept = 0
        with pytest.raises(BudgetExceededError, match=f"cannot be kept: nvme_budget {shown_size(budget)}"):
            while kept < 20:
                await training.step()
                await engine.kept_steps.keep(training.job, None, str(kept))
                kept += 1
        assert 2 <= kept == len(engine.jobs.kept_steps("job")) <= budget // version_bytes - steps
        # The job always finds the room for its next steps.
        for _ in range(3):
            await training.step()
        await training.assert_at(training.job.newest or 0)
        await engine.kept_steps.forget("job", "0")
        await engine.kept_steps.keep(training.job, None, "instead")
        for _ in range(2):
            await training.step()


async def test_kept_steps_count_for_a_limit_of_their_job(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["nvme"]).begin()
        await training.step()

        def limits(versions: int) -> list[Limit]:
            return [Limit(what="the quota", covers=lambda _: True, nvme_bytes=versions * training.version_bytes)]

        # The next steps need two versions, and each kept step is one more.
        await engine.kept_steps.keep(training.job, 1, "one", limits=limits(3))
        await training.step()
        with pytest.raises(BudgetExceededError, match=r"step 2 of job 'job' cannot be kept: the quota, nvme_bytes = "):
            await engine.kept_steps.keep(training.job, 2, "two", limits=limits(3))
        assert list(engine.jobs.kept_steps("job")) == ["one"]
        await engine.kept_steps.keep(training.job, 2, "two", limits=limits(4))
        with pytest.raises(BudgetExceededError, match="forget kept steps"):
            await engine.register(training.job, [LAYOUTS["nvme"].group("block.0")], limits(3))
        await engine.register(training.job, [LAYOUTS["nvme"].group("block.0")], limits(4))


async def test_a_catalog_that_fails_keeps_nothing_and_the_space_is_free_again(tmp_path: Path) -> None:
    def fail(reached: Failpoint) -> None:
        if reached is Failpoint.BEFORE_FLIP:
            raise DeviceError("the disk is gone")

    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["memory"]).begin()
        await training.step()
        used = engine.nvme.used_bytes
        failpoints.install(fail)
        try:
            with pytest.raises(DeviceError, match="the disk is gone"):
                await engine.kept_steps.keep(training.job, 1, "one")
        finally:
            failpoints.install(None)
        await training.step()
        assert engine.nvme.used_bytes == used and not engine.jobs.kept_steps("job")
        await engine.kept_steps.keep(training.job, 2, "two")
        failpoints.install(fail)
        try:
            with pytest.raises(DeviceError, match="the disk is gone"):
                await engine.kept_steps.forget("job", "two")
        finally:
            failpoints.install(None)
        await assert_kept(engine, engine.kept_steps.find("job", "two"), LAYOUTS["memory"])


async def test_a_sync_that_fails_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, "sync_data")
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["memory"]).begin()
        await training.step()
        fault.fail(DeviceError("input/output error"))
        with pytest.raises(DeviceError):
            await engine.kept_steps.keep(training.job, 1, "one")
        fault.heal()
        assert not engine.jobs.kept_steps("job")
        # The bytes that were written before the failure are doubtful, so the engine writes them again.
        await engine.kept_steps.keep(training.job, 1, "one")
    async with opened(tmp_path, **ROOMY) as engine:
        await assert_kept(engine, engine.kept_steps.find("job", "one"), LAYOUTS["memory"])


async def test_a_cancelled_request_leaves_a_kept_step_or_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["host"]).begin()
        for turns in range(0, 40, 4):
            await training.step()
            keeping = asyncio.ensure_future(engine.kept_steps.keep(training.job, None, str(turns)))
            for _ in range(turns):
                await asyncio.sleep(0)
            keeping.cancel()
            await asyncio.wait([keeping])
        await training.step()
        await engine.kept_steps.close()
        for kept in engine.jobs.kept_steps("job").values():
            await assert_kept(engine, kept, LAYOUTS["host"])
        holders: dict[Region, int] = {}
        for job in (training.job, *engine.jobs.kept_steps("job").values()):
            for slab in job.slabs():
                for region in slab.versions.values():
                    holders[region] = holders.get(region, 0) + 1
        assert all(region.holders == count for region, count in holders.items())
