"""Budgets and layouts are checked at open and registration, and a refusal names a budget that is large enough."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.base.errors import (
    AlreadyExistsError,
    BudgetExceededError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from storage.base.shard import DType, Durability, GroupSpec, Kind, Shard, SlabSpec, TierName
from storage.base.shown_sizes import shown_size
from storage.engine import Engine
from storage.memory.parkable import Gradient
from tests.unit.storage.builders import (
    ON_HOST,
    Layout,
    Training,
    engine_config,
    held,
    opened,
    quiesce,
    updating,
)

LAYOUT = Layout(precision=DType.BFLOAT16)


def needed(message: str) -> int:
    """Return the budget that a refusal names."""
    found = re.search(r"raise \w+ to at least (\d+)MiB", message)
    assert found is not None, message
    return int(found[1]) << 20


async def step_as_trainers_do(training: Training) -> None:
    """Make a step whose gradients are parked, because the budget may have no room for all of them."""

    async def park(gradient: Gradient) -> None:
        training.engine.gradients.park(gradient)

    step = training.job.next_step
    await training.hand_over(before_update=park)
    await training.commit(step)


@pytest.mark.parametrize("placements", [{}, ON_HOST], ids=["nvme", "host"])
@pytest.mark.parametrize("every_steps", [1, 2, 0])
@pytest.mark.parametrize("budget", ["host_budget", "nvme_budget"])
async def test_a_budget_too_small_is_refused_with_the_figure_that_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placements: dict[str, Any],
    every_steps: int,
    budget: str,
) -> None:
    layout = replace(LAYOUT, every_steps=every_steps, groups=tuple(f"block.{n}" for n in range(30)), **placements)
    if budget == "nvme_budget" and every_steps == 0 and placements:
        # Such a job writes nothing to NVMe.
        return
    if budget == "host_budget" and not placements:
        # Such a job runs in the smallest host budget of an engine, because its gradients need not stay there.
        return
    key = f"{budget}_bytes"
    small = {"host_budget": 3744 << 10, "nvme_budget": 1 << 20}[budget]
    figures = {"host_budget_bytes": 48 << 20, "nvme_budget_bytes": 96 << 20} | {key: small}
    async with opened(tmp_path / "refused", **figures) as engine:
        with pytest.raises(BudgetExceededError, match=f"{budget} {shown_size(small)} is too small") as caught:
            await Training(engine, layout).open(must_exist=False)
        assert engine.nvme.used_bytes == 0
    async with opened(tmp_path / "granted", **figures | {key: needed(str(caught.value))}) as engine:
        training = await Training(engine, layout).begin()
        await quiesce(engine)
        # A snapshot may take until the next one begins. That needs the most room.
        with held(monkeypatch, "sync_data", when=every_steps > 1) as go_on:
            for _ in range(every_steps + 1):
                await step_as_trainers_do(training)
            go_on.set()
            for _ in range(2):
                await step_as_trainers_do(training)
        await training.assert_at(training.job.next_step - 1)


async def test_a_host_budget_that_cannot_hold_the_smallest_tiles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetExceededError, match=r"host_budget .* raise it to at least") as caught:
        await Engine.open(engine_config(tmp_path, host_budget_bytes=256 << 10))
    figure = int(re.findall(r"at least (\d+)MiB", str(caught.value))[0]) << 20
    async with opened(tmp_path, host_budget_bytes=figure):
        pass


async def test_jobs_in_use_share_the_budgets(tmp_path: Path) -> None:
    """If two jobs fit alone but not together, the second one is refused, instead of failing in the middle of a step."""
    # A version of a group has 14 bytes per element, and 16 with the padding to pages.
    version = 4 * 4 * LAYOUT.group("g").numel
    async with opened(tmp_path, nvme_budget_bytes=2 * 2 * version, host_budget_bytes=16 << 20) as engine:
        first = Training(engine, replace(LAYOUT, name="first"))
        second = Training(engine, replace(LAYOUT, name="second"))
        await first.open(must_exist=False)
        with pytest.raises(BudgetExceededError, match="nvme_budget"):
            await second.open(must_exist=False)
        await first.stage_all()
        await first.commit(0)
        await first.step()
        await first.assert_at(1)


async def test_versions_that_are_being_written_are_not_reserved_once_more(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=16 << 20) as engine:
        first = await Training(engine, replace(LAYOUT, name="first")).begin()
        engine.nvme.budget_bytes = 4 * first.version_bytes
        async with updating(first) as go_on:
            second = await Training(engine, replace(LAYOUT, name="second")).begin()
            go_on.set()
            await first.commit(1)
        await second.step()
        for training in (first, second):
            await training.assert_at(1)


@asynccontextmanager
async def with_the_budget_asked_for(directory: Path, layout: Layout) -> AsyncIterator[Engine]:
    """Yield an engine with the nvme_budget that the refusal of a job names."""
    async with opened(directory / "refused", nvme_budget_bytes=1 << 20) as engine:
        with pytest.raises(BudgetExceededError) as caught:
            await Training(engine, layout).open(must_exist=False)
    async with opened(directory / "granted", nvme_budget_bytes=needed(str(caught.value))) as engine:
        yield engine


async def test_ranks_on_other_nodes_cost_one_more_version(tmp_path: Path) -> None:
    layout = replace(LAYOUT, world_size=2)
    async with with_the_budget_asked_for(tmp_path, layout) as engine:
        training = await Training(engine, layout).begin()
        for step in range(1, 5):
            await training.step(settled=step - 1)
        await training.assert_at(4)


@pytest.mark.parametrize("placements", [{}, ON_HOST], ids=["nvme", "host"])
async def test_ranks_on_other_nodes_cost_one_more_snapshot(tmp_path: Path, placements: dict[str, Any]) -> None:
    layout = replace(LAYOUT, world_size=2, every_steps=2, **placements)
    async with with_the_budget_asked_for(tmp_path, layout) as engine:
        training = await Training(engine, layout).begin()
        for step in range(1, 10):
            await quiesce(engine)
            await training.step(settled=step - 1)
        await training.assert_at(9)
        assert training.job.durable == {4, 6, 8}


async def test_a_refused_registration_leaves_nothing_registered(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = Training(engine, replace(LAYOUT, groups=("small",), **ON_HOST))
        await training.open(must_exist=False)
        used = engine.host.used_bytes
        with pytest.raises(BudgetExceededError):
            await engine.register(training.job, [training.layout.group(str(n)) for n in range(20)])
        assert list(training.job.groups) == ["small"] and engine.host.used_bytes == used
        await training.stage_all()
        await training.commit(0)
        await training.step()
        await training.assert_at(1)


async def test_ranks_that_register_while_there_is_no_room_each_get_their_places_and_no_more(tmp_path: Path) -> None:
    layout = replace(LAYOUT, world_size=2, **ON_HOST)
    async with opened(tmp_path, admission_timeout_seconds=30.0) as engine:
        job = await engine.open_job(layout.job(), may_exist=True, must_exist=False)
        filler = await engine.host.allocate(engine.host.budget_bytes - engine.host.used_bytes)
        names = [*layout.groups, layout.groups[0]]
        ranks = [asyncio.ensure_future(engine.register(job, [layout.group(name)])) for name in names]
        async with asyncio.timeout(10.0):
            while not engine.host.queue_depth:
                await asyncio.sleep(0.01)
        assert not any(rank.done() for rank in ranks) and engine.host.queue_depth == 1
        engine.host.free(filler)
        await asyncio.gather(*ranks)
        assert all(slab.copy is not None for slab in job.slabs())


async def test_a_registration_that_finds_no_room_in_time_registers_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, admission_timeout_seconds=0.05) as engine:
        base = engine.host.used_bytes
        training = Training(engine, replace(LAYOUT, **ON_HOST))
        filler = await engine.host.allocate(engine.host.budget_bytes - base)
        with pytest.raises(BudgetExceededError, match="had no room"):
            await training.open(must_exist=False)
        engine.host.free(filler)
        assert not training.job.groups and engine.host.used_bytes == base
        await training.begin()


async def test_a_registration_whose_job_is_deleted_while_it_waits_for_room_keeps_no_place(tmp_path: Path) -> None:
    layout = replace(LAYOUT, **ON_HOST)
    async with opened(tmp_path, admission_timeout_seconds=30.0) as engine:
        base = engine.host.used_bytes
        training = Training(engine, layout)
        filler = await engine.host.allocate(engine.host.budget_bytes - base)
        opening = asyncio.ensure_future(training.open(must_exist=False))
        await asyncio.sleep(0.02)
        await engine.delete_job(layout.name)
        engine.host.free(filler)
        with pytest.raises(ConflictError, match=r"job 'job' was deleted while job/block\.0/param was waited for"):
            await opening
        assert engine.host.used_bytes == base
        await training.begin()


async def test_opening_keeps_the_resume_policies(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        spec = LAYOUT.job()
        with pytest.raises(NotFoundError, match="job 'job' has no committed step to resume from"):
            await engine.open_job(spec, may_exist=True, must_exist=True)
        await Training(engine, LAYOUT).begin()
        with pytest.raises(AlreadyExistsError, match=r"job 'job' has committed step 0 .*delete the job"):
            await engine.open_job(spec, may_exist=False, must_exist=False)
        job = await engine.open_job(spec, may_exist=True, must_exist=True)
        assert job.newest == 0
        with pytest.raises(NotFoundError, match=r"no job 'jib'$"):
            engine.jobs.job("jib")


async def test_a_job_that_committed_nothing_is_begun_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = Training(engine, LAYOUT)
        await training.open(must_exist=False)
        await training.stage_all()
        again = Training(engine, replace(LAYOUT, groups=("other",)))
        await again.open(must_exist=False)
        assert engine.nvme.used_bytes == 0 and list(again.job.groups) == ["other"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"world_size": 2}, "stored by 1 ranks and this run has 2"),
        (
            {"numels": (30_003, 18, 12_000)},
            r"parameter 'block\.0\.weight\.1' has shape \[17\] in the store and \[18\] in this model",
        ),
        ({"numels": (30_003, 17)}, r"parameters 'block\.0\.weight\.2', 'block\.1\.weight\.2' are not in this model"),
        (
            {"groups": ("block.0", "block.1", "block.2", "block.3")},
            r"parameters 'block\.2\.weight\.0', 'block\.2\.weight\.1', 'block\.2\.weight\.2' and 3 more are not in the "
            "stored job",
        ),
        ({"precision": DType.FLOAT16}, r"'block\.0\.weight\.0' is \[30003\] bfloat16 .* \[30003\] float16"),
        ({"every_steps": 5}, "durability step and this run asks for snapshot:5"),
    ],
)
async def test_another_layout_is_refused_by_the_first_difference(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        with pytest.raises(ConflictError, match=f"job 'job' .*{named}") as refused:
            await engine.open_job(replace(LAYOUT, **change).job(), may_exist=True, must_exist=False)  # type: ignore[arg-type]
        assert "use another job name" in str(refused.value)
        await training.assert_at(0)


async def test_another_partition_of_the_same_model_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        spec = LAYOUT.group("block.0")
        with pytest.raises(ConflictError, match="has no shard group 'elsewhere': it was stored with another partition"):
            await engine.register(training.job, [replace(spec, name="elsewhere")])
        with pytest.raises(ConflictError, match=r"'block\.0' is stored with another layout or precision"):
            await engine.register(training.job, [replace(spec, numel=spec.numel + 16)])


@pytest.mark.parametrize("to_host", [True, False])
async def test_placements_can_change_between_runs(tmp_path: Path, to_host: bool) -> None:
    on_nvme, on_host = LAYOUT, replace(LAYOUT, **ON_HOST)
    before, after = (on_nvme, on_host) if to_host else (on_host, on_nvme)
    async with opened(tmp_path) as engine:
        training = await Training(engine, before).begin()
        await training.step()
        await engine.end_run(training.job)
        training = await Training(engine, after).open()
        await training.assert_goes_on_from(1)
    async with opened(tmp_path) as engine:
        placements = {slab.spec.placement for slab in engine.jobs.job("job").slabs()}
        assert placements == {TierName.HOST if to_host else TierName.NVME}
        await (await Training(engine, after).open()).assert_at(2)


async def test_bytes_that_are_in_host_memory_only_stay_there(tmp_path: Path) -> None:
    volatile = replace(LAYOUT, every_steps=0, **ON_HOST)
    async with opened(tmp_path) as engine:
        training = await Training(engine, volatile).begin()
        await training.step()
        await engine.end_run(training.job)
        with pytest.raises(ConflictError, match="placement cannot change from host to nvme"):
            await Training(engine, replace(LAYOUT, every_steps=0)).open()
        again = await Training(engine, volatile).open()
        await again.assert_at(1)
        await again.step()
        await again.assert_at(2)


async def test_a_job_that_nobody_uses_gives_its_host_memory_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        base = engine.host.used_bytes
        training = await Training(engine, replace(LAYOUT, **ON_HOST)).begin()
        await training.step()
        await training.hand_over()
        await engine.end_run(training.job)
        assert engine.host.used_bytes == base
        await (await Training(engine, replace(LAYOUT, **ON_HOST)).open()).assert_at(1)


async def test_a_deleted_job_leaves_no_byte_behind(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        base = engine.host.used_bytes
        await Training(engine, replace(LAYOUT, name="other")).begin()
        other = engine.nvme.used_bytes
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        await training.hand_over()
        await engine.delete_job("job")
        assert engine.nvme.used_bytes == other
        await engine.delete_job("other")
        assert engine.nvme.used_bytes == 0 and engine.host.used_bytes == base
        with pytest.raises(NotFoundError, match="no job"):
            await engine.delete_job("job")
    async with opened(tmp_path) as engine:
        assert engine.jobs.by_name == {}


GOOD = GroupSpec(
    name="g",
    numel=64,
    shards=(Shard(fqn="a", offset=0, numel=17, group_offset=0), Shard(fqn="b", offset=16, numel=32, group_offset=32)),
    slabs=(SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=TierName.HOST),),
)


def moved(index: int, **change: Any) -> tuple[Shard, ...]:
    return tuple(replace(shard, **change) if i == index else shard for i, shard in enumerate(GOOD.shards))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": ""}, "empty name"),
        ({"numel": 0}, "numel 0 must be a positive multiple of 16"),
        ({"numel": 65}, "numel 65 must be"),
        ({"numel": 48}, "shard 'b' at position 32, 32 elements, overlaps its neighbour or leaves"),
        ({"shards": moved(0, numel=33)}, "shard 'b' at position 32"),
        ({"shards": moved(0, numel=0)}, "shard 'a' at position 0, 0 elements"),
        ({"shards": moved(1, group_offset=40, numel=8)}, "shard 'b' starts at offset 16, position 40"),
        ({"shards": moved(1, offset=8)}, "shard 'b' starts at offset 8"),
        ({"shards": GOOD.shards[::-1]}, "shard 'a' at position 0"),
        ({"slabs": ()}, "no slab of kind param"),
        ({"slabs": GOOD.slabs * 2}, "names a kind twice"),
    ],
)
def test_a_malformed_group_is_refused_by_its_name_and_field(change: dict[str, object], named: str) -> None:
    GOOD.validate()
    with pytest.raises(InvalidRequestError, match=f"group.*{named}"):
        replace(GOOD, **change).validate()  # type: ignore[arg-type]


def test_a_durability_says_which_steps_it_covers() -> None:
    covered = {n: [step for step in range(7) if Durability(every_steps=n).covers(step)] for n in (0, 1, 3)}
    assert covered == {0: [], 1: [0, 1, 2, 3, 4, 5, 6], 3: [0, 3, 6]}
    assert [str(Durability(every_steps=n)) for n in (0, 1, 3)] == ["none", "step", "snapshot:3"]


async def test_the_directory_is_for_one_engine_and_the_second_is_told_by_whose_pid(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(ConflictError, match=r"in use by the daemon with pid \d+; stop that one, or .*--state-dir"):
            await Engine.open(engine_config(tmp_path))
    async with opened(tmp_path):
        pass
