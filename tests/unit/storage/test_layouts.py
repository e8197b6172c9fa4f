"""A job that goes on in another layout: the former one stays until the new one is committed, and then is freed."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from storage.base import failpoints
from storage.base.errors import (
    BudgetExceededError,
    ConflictError,
    DeviceError,
    DeviceStuckError,
    DiskFullError,
    InvalidRequestError,
    StorageError,
)
from storage.base.failpoints import Failpoint
from storage.base.shard import DType, GroupSpec, JobSpec, Kind, Shard, TierName
from storage.base.shown_sizes import shown_size
from storage.base.waiting import unlogged
from storage.engine import Engine
from storage.jobs.admission import Limit
from storage.state.versions import Job
from storage.steps.reader import StepReader
from tests.unit.storage.builders import MIB, Fault, Layout, Training, held, opened

LAYOUTS = {
    "nvme": Layout(precision=DType.BFLOAT16),
    "host": Layout(precision=DType.BFLOAT16, weights=TierName.HOST, moments=TierName.HOST),
    "snapshots": Layout(moments=TierName.HOST, every_steps=4),
    "memory": Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=0),
}
ROOMY = {"host_budget_bytes": 16 * MIB, "nvme_budget_bytes": 32 * MIB}


def halves(layout: Layout) -> list[GroupSpec]:
    """Return the groups of two ranks: the same tensors, each cut in two."""
    groups = []
    for name in layout.groups:
        whole = layout.group(name)
        for first in (True, False):
            shards, position = [], 0
            for shard in whole.shards:
                middle = shard.numel // 2 // 16 * 16
                offset, numel = (0, middle) if first else (middle, shard.numel - middle)
                if numel:
                    shards.append(Shard(fqn=shard.fqn, offset=offset, numel=numel, group_offset=position))
                    position += -(-numel // 16) * 16
            groups.append(GroupSpec(name=f"{name}/{first}", numel=position, shards=tuple(shards), slabs=whole.slabs))
    return groups


def spec_of(layout: Layout, name: str = "halves", ranks: int = 2) -> JobSpec:
    return replace(layout.job(), layout=name, world_size=2, local_ranks=ranks)


def limit_of(nvme_bytes: int) -> Limit:
    """Return a limit of the NVMe bytes of all jobs together."""
    return Limit(what="the quota", covers=lambda _: True, nvme_bytes=nvme_bytes)


async def begin(training: Training, spec: JobSpec, limits: Sequence[Limit] = ()) -> Job:
    """Begin another layout of a training's job, reserve room for its groups, and return the new job."""
    engine, step = training.engine, training.job.newest
    assert step is not None
    job = await engine.open_job(spec, may_exist=True, must_exist=True)
    laid_out = await engine.lay_out(job, spec, step + 1)
    await engine.register(laid_out, halves(training.layout), limits)
    return laid_out


async def fill(engine: Engine, source: StepReader, job: Job, groups: Sequence[GroupSpec]) -> None:
    """Stage the bytes of a reader's step in the groups of a new layout."""
    for group in groups:
        for kind, slab in group.slab_of_kind.items():
            if kind is Kind.GRAD:
                continue
            pin = await engine.pins.stage(job, group.name, kind)
            target = engine.host.tensor(pin.arena_range, slab.dtype, group.numel).zero_()
            for shard in group.shards:
                data = await piece(source, shard.fqn, kind, shard.offset, shard.numel)
                target[shard.group_offset :][: shard.numel] = torch.frombuffer(data, dtype=slab.dtype.torch)
            await engine.pins.publish(pin)


async def piece(source: StepReader, fqn: str, kind: Kind, offset: int, numel: int) -> bytearray:
    return bytearray(b"".join([piece async for piece in source.read(fqn, kind, offset, numel)]))


async def begin_filled(training: Training, spec: JobSpec) -> tuple[Job, int]:
    """Begin and fill another layout of a training's job. Return it and its first step, which is not committed."""
    source = await training.engine.step_readers.open(training.job)
    job = await begin(training, spec)
    await fill(training.engine, source, job, halves(training.layout))
    source.close()
    return job, source.step + 1


async def lay_out(training: Training, spec: JobSpec, *, settled: int | None = None) -> Job:
    """Begin, fill and commit another layout of a training's job. All ranks have `settled` (None: this step)."""
    job, step = await begin_filled(training, spec)
    await training.engine.commit(job, step, {0: b"carried over"}, step if settled is None else settled)
    return job


async def assert_holds(engine: Engine, job: Job, layout: Layout, trained: int) -> None:
    """Check that all tensors of a job's newest step are those of torch after `trained` steps, bit for bit."""
    reader = await engine.step_readers.open(job, unsettled=True)
    for (_, fqn, kind), expected in Training(engine, layout).reference.states(trained).items():
        data = await piece(reader, fqn, kind, 0, len(expected))
        assert torch.equal(torch.frombuffer(data, dtype=layout.dtype(kind).torch), expected), f"{fqn} {kind}"
    reader.close()


def nvme_bytes(job: Job) -> int:
    return sum(region.nbytes for slab in job.slabs() for region in slab.versions.values())


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_job_goes_on_in_another_layout_with_the_same_bits(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        for _ in range(3):
            await training.step()
        await engine.end_run(training.job)
        job = await lay_out(training, spec_of(layout))
        assert (engine.jobs.job("job"), engine.jobs.layouts("job")) == (job, [job])
        assert (job.newest, job.settled, training.job.successor) == (4, 4, job)
        await assert_holds(engine, job, layout, trained=3)
    async with opened(tmp_path, **ROOMY) as engine:
        assert list(engine.jobs.by_name) == ([] if name == "memory" else ["job"])
        for job in engine.jobs.by_name.values():
            assert (job.spec.layout, job.spec.world_size, job.newest) == ("halves", 2, 4)
            assert job.retained[4].client_states == {0: b"carried over"}
            assert engine.nvme.used_bytes == nvme_bytes(job)
            await assert_holds(engine, job, layout, trained=3)


@pytest.mark.parametrize("name", ["nvme", "host", "snapshots"])
async def test_a_crash_leaves_the_former_layout_or_the_new_one_whole(tmp_path: Path, name: str) -> None:
    """The state directory is copied at each failpoint of the commit that changes the layout."""
    layout = LAYOUTS[name]
    images: list[tuple[Failpoint, Path]] = []

    def take_image(reached: Failpoint) -> None:
        image = tmp_path / f"{len(images)} {reached.value}"
        shutil.copytree(tmp_path / "state", image, ignore=shutil.ignore_patterns("*.sock"))
        images.append((reached, image))

    async with opened(tmp_path / "state", **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        for _ in range(4):
            await training.step()
        await engine.end_run(training.job)
        if training.job.snapshot is not None:
            await asyncio.wait([training.job.snapshot])
        failpoints.install(take_image)
        try:
            await lay_out(training, spec_of(layout))
        finally:
            failpoints.install(None)
    flip = next(index for index, (reached, _) in enumerate(images) if reached is Failpoint.AFTER_FLIP)
    assert {Failpoint.DATA_WRITTEN, Failpoint.DATA_SYNCED, Failpoint.BEFORE_FLIP} <= {r for r, _ in images[:flip]}
    # The transaction that frees the former layout comes after the one that makes the new one current.
    assert [reached for reached, _ in images[flip:]].count(Failpoint.AFTER_FLIP) == 2
    interesting = [images[0], images[flip - 1], images[flip], images[-1]]
    for index, (reached, image) in enumerate(interesting):
        async with opened(image, **ROOMY) as engine:
            job = engine.jobs.job("job")
            expected = ("", 4) if index < 2 else ("halves", 5)
            assert (job.spec.layout, job.newest) == expected, reached
            assert len(engine.jobs.layouts("job")) == (2 if index == 2 else 1)
            await assert_holds(engine, job, layout, trained=4)


async def test_the_former_layout_stays_until_all_ranks_everywhere_have_the_new_one(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.end_run(training.job)
        former = training.job
        job = await lay_out(training, spec_of(layout, ranks=1), settled=1)
        assert engine.jobs.layouts("job") == [former, job]
        assert engine.nvme.used_bytes == nvme_bytes(former) + nvme_bytes(job)
    async with opened(tmp_path, **ROOMY) as engine:
        former, job = engine.jobs.layouts("job")
        assert [(j.spec.layout, j.newest) for j in (former, job)] == [("", 1), ("halves", 2)]
        for held in (former, job):
            await assert_holds(engine, held, layout, trained=1)
        # The next run knows that all its stores have the new layout, and passes that to its first commit (`settled`).
        job = await engine.open_job(spec_of(layout, "unused", ranks=1), may_exist=True, must_exist=True)
        await engine.register(job, halves(layout))
        await engine.commit(job, 3, {0: b""}, 2)
        assert engine.jobs.layouts("job") == [job]
        assert engine.nvme.used_bytes == nvme_bytes(job)
        await engine.end_run(job)


async def test_what_is_not_committed_is_discarded_and_the_job_is_as_it_was(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        before = engine.nvme.used_bytes
        for end in ("end the run", "open", "lay out", "delete"):
            source = await engine.step_readers.open(engine.jobs.job("job"))
            job = await begin(training, spec_of(layout))
            await fill(engine, source, job, halves(layout)[:1])
            source.close()
            assert engine.nvme.used_bytes > before
            if end == "end the run":
                await engine.end_run(job)
            elif end == "open":
                await training.open()
            elif end == "lay out":
                await engine.lay_out(engine.jobs.job("job"), spec_of(layout, "other"), 7)
            if end == "delete":
                await engine.delete_job("job")
                assert engine.nvme.used_bytes == 0
                continue
            assert engine.nvme.used_bytes == before
            await training.open()
            await training.assert_at(1)
            assert engine.jobs.layouts("job") == [training.job]
        await training.begin()
        await training.step()
        await training.assert_at(1)


async def test_a_reader_of_the_former_layout_survives_it(tmp_path: Path) -> None:
    layout = LAYOUTS["host"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.end_run(training.job)
        reader = await engine.step_readers.open(training.job)
        job = await lay_out(training, spec_of(layout))
        for (_, fqn, kind), expected in training.reference.states(1).items():
            data = await piece(reader, fqn, kind, 0, len(expected))
            assert torch.equal(torch.frombuffer(data, dtype=layout.dtype(kind).torch), expected)
        assert engine.nvme.used_bytes == reader.nbytes + nvme_bytes(job)
        reader.close()
        assert engine.nvme.used_bytes == nvme_bytes(job)
        await engine.end_run(job)


async def test_budgets_and_limits_count_both_layouts(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.end_run(training.job)
        one = training.version_bytes
        # The NVMe tier must hold a committed version of the former layout, and two of the new one.
        for limit in (2 * one, 3 * one - 4096):
            with pytest.raises(BudgetExceededError, match=f"nvme_bytes = {shown_size(limit)}, is too small"):
                await begin(training, spec_of(layout), [limit_of(limit)])
        job = await begin(training, spec_of(layout), [limit_of(4 * one)])
        await engine.end_run(job)
    async with opened(tmp_path, **(ROOMY | {"nvme_budget_bytes": 5 * one // 2})) as engine:
        training = await Training(engine, layout).open()
        await engine.end_run(training.job)
        with pytest.raises(BudgetExceededError, match="nvme_budget"):
            await begin(training, spec_of(layout))
        await training.open()
        await training.step()
        await training.assert_at(2)


async def test_a_former_layout_that_cannot_be_freed_is_freed_by_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.end_run(training.job)
        catalog = engine._catalog
        with monkeypatch.context() as patch:

            def refuse(jobs: object) -> None:
                raise DiskFullError("the file system of the catalog is full")

            patch.setattr(catalog, "delete_jobs", refuse)
            job = await lay_out(training, spec_of(layout))
        assert len(engine.jobs.layouts("job")) == 2 and job.newest == 2
        await engine.commit(job, 3, {0: b""}, 3)
        assert engine.jobs.layouts("job") == [job]
        await engine.end_run(job)


async def test_a_commit_that_fails_leaves_the_former_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.end_run(training.job)
        job, step = await begin_filled(training, spec_of(layout))
        with monkeypatch.context() as patch:
            Fault(patch, "sync_data").fail(DeviceError("data.0: Input/output error"))
            with pytest.raises(StorageError, match="Input/output error"):
                await engine.commit(job, step, {0: b""}, step)
        await engine.end_run(job)
        await training.open()
        await training.assert_at(1)


@asynccontextmanager
async def committing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Job, threading.Event]]:
    """Yield a new layout, whose first commit, step 2, waits in its sync, and the event that ends this wait."""
    layout = LAYOUTS["nvme"]
    training = await Training(engine, layout).begin()
    await training.step()
    await engine.end_run(training.job)
    job, step = await begin_filled(training, spec_of(layout))
    with held(monkeypatch, "sync_data") as go_on:
        commit = unlogged(asyncio.ensure_future(engine.commit(job, step, {0: b""}, step)))
        while job.pending is None or job.pending.at_rest.is_set():
            await asyncio.sleep(0)
        yield job, go_on
        go_on.set()
        await asyncio.wait([commit])


@pytest.mark.parametrize("is_stuck", [False, True], ids=["slow", "stuck"])
async def test_a_layout_whose_first_commit_is_under_way_is_there_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    """The call that opens the job waits for the commit. It goes on when a stuck device answers."""
    spec = spec_of(LAYOUTS["nvme"])
    async with opened(tmp_path, **ROOMY, device_timeout_seconds=1.0 if is_stuck else 30) as engine:
        async with committing(engine, monkeypatch) as (job, go_on):
            opening = unlogged(asyncio.ensure_future(engine.open_job(spec, may_exist=True, must_exist=True)))
            await asyncio.sleep(0.02)
            if is_stuck:
                with pytest.raises(DeviceStuckError):
                    await opening
            go_on.set()
            while job.pending is not None or engine.backing.problems_of(engine.nvme):
                await asyncio.sleep(0.001)
            again = await (engine.open_job(spec, may_exist=True, must_exist=True) if is_stuck else opening)
            assert again is job and job.newest == 2
        while job.older:
            await asyncio.sleep(0.001)
        assert engine.jobs.layouts("job") == [job]
        assert engine.nvme.used_bytes == nvme_bytes(job)
        await assert_holds(engine, job, LAYOUTS["nvme"], trained=1)
        await engine.end_run(job)
    async with opened(tmp_path, **ROOMY) as engine:
        (job,) = engine.jobs.layouts("job")
        assert (job.spec.layout, job.newest) == ("halves", 2)
        await assert_holds(engine, job, LAYOUTS["nvme"], trained=1)


async def test_a_job_is_deleted_with_the_layout_whose_first_commit_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        async with committing(engine, monkeypatch) as (_, go_on):
            deleting = asyncio.ensure_future(engine.delete_job("job"))
            await asyncio.sleep(0.02)
            go_on.set()
            await deleting
        assert not engine.jobs.by_name and engine.nvme.used_bytes == 0
    async with opened(tmp_path, **ROOMY) as engine:
        assert not engine.jobs.by_name and engine.nvme.used_bytes == 0


async def test_a_store_that_joins_begins_with_the_step_of_the_others(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        spec = spec_of(layout, ranks=1)
        job = await engine.open_job(spec, may_exist=True, must_exist=False)
        assert await engine.lay_out(job, spec, 8) is job
        await engine.register(job, halves(layout))
        with pytest.raises(ConflictError, match="step 0 cannot be prepared, the next one is 8"):
            await engine.commit(job, 0, {0: b""}, 0)
        with pytest.raises(ConflictError, match="has no initial values; publish them before step 8 is committed"):
            await engine.commit(job, 8, {0: b""}, 7)
        await engine.end_run(job)
        assert not engine.jobs.by_name


async def test_a_layout_has_a_name_of_its_own(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        job = await lay_out(training, spec_of(layout))
        with pytest.raises(ConflictError, match="has a layout 'halves' already"):
            await engine.lay_out(job, spec_of(layout), 9)
        with pytest.raises(InvalidRequestError, match="a name has no line feed"):
            replace(spec_of(layout), layout="two\nlines")
        await engine.end_run(job)


async def test_without_a_name_for_its_layout_a_client_gets_only_what_is_laid_out_as_it_says(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        with pytest.raises(ConflictError, match="stored by 1 ranks and this run has 2"):
            await engine.open_job(spec_of(layout, ""), may_exist=True, must_exist=True)
        other = replace(spec_of(layout), parameters=layout.job().parameters[1:])
        with pytest.raises(ConflictError, match=r"parameter 'block\.0\.weight\.0' is not in this model"):
            await engine.open_job(other, may_exist=True, must_exist=True)
        job = await engine.open_job(spec_of(layout), may_exist=True, must_exist=True)
        assert (job, job.spec.world_size, job.spec.local_ranks) == (training.job, 1, 0)
