"""Puts: bytes that a client gives as a slab's version of any step, committed, rolled back and read like an update's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from storage.base.errors import BudgetExceededError, ConflictError, DiskFullError, NotFoundError
from storage.base.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.engine import Engine
from storage.state.versions import Job
from storage.steps.reader import StepReader
from tests.unit.storage.builders import MIB, Fault, Layout, Training, check_tally, opened, quiesce

NUMELS = {"a": 30_000, "b": 70_016, "c": 16}
PLACES = pytest.mark.parametrize(
    ("placement", "every_steps"),
    [(TierName.NVME, 1), (TierName.HOST, 1), (TierName.HOST, 2), (TierName.NVME, 0), (TierName.HOST, 0)],
)


def value(name: str, step: int, numel: int | None = None) -> torch.Tensor:
    """Return the value that tensor `name` gets at `step`."""
    generator = torch.Generator().manual_seed(1000 * step + ord(name))
    return torch.randn(numel or NUMELS[name], generator=generator).bfloat16()


class Table:
    """A job without optimizer states, with one group for each tensor, and the expected values at each step."""

    def __init__(
        self,
        engine: Engine,
        placement: TierName = TierName.NVME,
        every_steps: int = 1,
        numels: Mapping[str, int] = NUMELS,
    ) -> None:
        self.engine = engine
        self.numels = numels
        self.placement = placement
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.spec = JobSpec(
            name="table",
            world_size=1,
            local_ranks=1,
            parameters=tuple(
                ParameterSpec(fqn=name, shape=(numel,), dtype=DType.BFLOAT16, trainable=False)
                for name, numel in numels.items()
            ),
            durability=Durability(every_steps=every_steps),
        )
        self.job: Job

    async def open(self) -> Table:
        """Open the job and register its groups."""
        self.job = await self.engine.open_job(self.spec, may_exist=True, must_exist=False)
        slab = SlabSpec(kind=Kind.PARAM, dtype=DType.BFLOAT16, placement=self.placement)
        await self.engine.register(
            self.job,
            [
                GroupSpec(
                    name=f"group of {name}",
                    numel=-(-numel // 16) * 16,
                    shards=(Shard(fqn=name, offset=0, numel=numel, group_offset=0),),
                    slabs=(slab,),
                )
                for name, numel in self.numels.items()
            ],
        )
        return self

    async def begin(self) -> Table:
        """Open the job, and commit the values of step 0."""
        await self.open()
        for name in self.numels:
            pin = await self.engine.pins.stage(self.job, f"group of {name}", Kind.PARAM)
            staged = self.engine.host.tensor(pin.arena_range, DType.BFLOAT16, self.numels[name])
            staged[:] = value(name, 0, self.numels[name])
            await self.engine.pins.publish(pin)
        await self.commit(self.numels)
        return self

    async def put(self, name: str, step: int) -> None:
        """Put the tensor's value of `step`."""
        range_ = await self.engine.pending_steps.allocate_put(self.job, step, f"group of {name}", Kind.PARAM)
        self.engine.host.tensor(range_, DType.BFLOAT16, self.numels[name])[:] = value(name, step, self.numels[name])
        await self.engine.pending_steps.put(self.job, step, f"group of {name}", Kind.PARAM, range_)

    async def commit(self, written: Iterable[str], *, settled: int | None = None) -> bool:
        """Commit the next step, in which the tensors `written` have got new values."""
        step = self.job.next_step
        durable = await self.engine.commit(self.job, step, {}, step if settled is None else settled)
        self.expected[step] = self.expected.get(step - 1, {}) | {
            name: value(name, step, self.numels[name]) for name in written
        }
        return durable

    async def step(self, *names: str, settled: int | None = None) -> bool:
        """Put and commit new values of the tensors `names`."""
        step = self.job.next_step
        for name in names:
            await self.put(name, step)
        return await self.commit(names, settled=settled)

    async def assert_at(self, step: int) -> None:
        """Check that the newest values are those of `step`."""
        for name, expected in self.expected[step].items():
            pin = await self.engine.pins.fetch(self.job, f"group of {name}", Kind.PARAM)
            stored = self.engine.host.tensor(pin.arena_range, DType.BFLOAT16, self.numels[name])
            assert torch.equal(stored, expected), name
            self.engine.pins.unpin(pin)
        check_tally(self.job)

    async def assert_reads(self, reader: StepReader) -> None:
        """Check that the reader sees the values of its step."""
        for name, expected in self.expected[reader.step].items():
            data = b"".join([piece async for piece in reader.read(name, Kind.PARAM, 0, self.numels[name])])
            assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.bfloat16), expected), name


@PLACES
async def test_each_step_has_the_values_put_in_it_and_the_older_ones_of_what_was_not(
    tmp_path: Path, placement: TierName, every_steps: int
) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine, placement, every_steps).begin()
        for names in ("ab", "c", "", "bc", "abc"):
            assert await table.step(*names) is (every_steps == 1)
            await table.assert_at(table.job.next_step - 1)


@PLACES
async def test_a_reader_holds_its_step_while_newer_ones_are_put(
    tmp_path: Path, placement: TierName, every_steps: int
) -> None:
    async with opened(tmp_path, nvme_budget_bytes=32 * MIB) as engine:
        table = await Table(engine, placement, every_steps).begin()
        readers = []
        for names in ("ab", "c", "abc", "a"):
            readers.append(await engine.step_readers.open(table.job))
            await table.put(names[0], table.job.next_step)
            readers.append(
                await engine.step_readers.open(table.job, table.job.newest)
            ) if placement is TierName.NVME else None
            for name in names[1:]:
                await table.put(name, table.job.next_step)
            await table.commit(names)
            for reader in readers:
                await table.assert_reads(reader)
        for reader in readers:
            reader.close()
        await table.assert_at(4)


async def test_whoever_holds_the_older_bytes_in_host_memory_keeps_them(tmp_path: Path) -> None:
    for number, placement in enumerate((TierName.NVME, TierName.HOST)):
        async with opened(tmp_path / str(number)) as engine:
            table = await Table(engine, placement, every_steps=0).begin()
            pin = await engine.pins.fetch(table.job, "group of a", Kind.PARAM)
            await table.step("a")
            await table.assert_at(1)
            assert torch.equal(engine.host.tensor(pin.arena_range, DType.BFLOAT16, NUMELS["a"]), value("a", 0))
            engine.pins.unpin(pin)


@PLACES
async def test_an_abandoned_put_leaves_the_committed_step(
    tmp_path: Path, placement: TierName, every_steps: int
) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine, placement, every_steps).begin()
        await table.step("a", "b")
        used = engine.nvme.used_bytes
        await table.put("a", 2)
        await table.put("c", 2)
        await engine.pending_steps.abandon(table.job)
        await table.assert_at(1)
        await quiesce(engine)
        assert every_steps == 2 or engine.nvme.used_bytes == used
        await table.step("c")
        await table.assert_at(2)


async def test_a_roll_back_takes_puts_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine).begin()
        await table.step("a", "b", settled=0)
        await table.put("a", 2)
        await engine.roll_back(table.job, 0)
        await table.assert_at(0)
        await table.step("c")
        await table.assert_at(1)


@pytest.mark.parametrize("placement", [TierName.NVME, TierName.HOST])
async def test_puts_are_durable_as_the_job_says(tmp_path: Path, placement: TierName) -> None:
    for every_steps, kept in ((1, 3), (2, 2)):
        path = tmp_path / str(every_steps)
        async with opened(path) as engine:
            table = await Table(engine, placement, every_steps).begin()
            for names in ("a", "ab", "c"):
                await table.step(*names)
            await quiesce(engine)
            expected = table.expected
        async with opened(path) as engine:
            table = await Table(engine, placement, every_steps).open()
            table.expected = expected
            assert table.job.newest == kept
            await table.assert_at(kept)
            await table.step("b")
            await table.assert_at(kept + 1)


async def test_the_next_write_of_a_slab_in_host_memory_waits_for_its_snapshot(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine, TierName.HOST, every_steps=2).begin()
        for _ in range(6):
            await table.step("a", "b", "c")
        await quiesce(engine)
        expected = table.expected
    async with opened(tmp_path) as engine:
        table = await Table(engine, TierName.HOST, every_steps=2).open()
        table.expected = expected
        assert table.job.newest == 6
        await table.assert_at(6)


async def test_what_cannot_be_put_is_refused_and_its_room_is_freed(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine).begin()
        with pytest.raises(ConflictError, match="step 0 cannot be prepared, the next one is 1"):
            await table.put("a", 0)
        with pytest.raises(NotFoundError, match="no slab of kind master"):
            await engine.pending_steps.allocate_put(table.job, 1, "group of a", Kind.MASTER)
        twice = [await engine.pending_steps.allocate_put(table.job, 1, "group of a", Kind.PARAM) for _ in range(2)]
        await engine.pending_steps.put(table.job, 1, "group of a", Kind.PARAM, twice[0])
        with pytest.raises(ConflictError, match="table/group of a/param was put in step 1 already"):
            await engine.pending_steps.put(table.job, 1, "group of a", Kind.PARAM, twice[1])
        await engine.pending_steps.abandon(table.job)
        late = await engine.pending_steps.allocate_put(table.job, 1, "group of b", Kind.PARAM)
        await table.step("c")
        with pytest.raises(ConflictError, match="the next one is 2"):
            await engine.pending_steps.put(table.job, 1, "group of b", Kind.PARAM, late)
        await table.assert_at(1)


async def test_a_full_disk_is_told_at_once_and_by_the_commit_and_the_job_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine).begin()
        await table.step("a")
        writes = Fault(monkeypatch, "write_exact")
        writes.fail(DiskFullError("no space left on the device"))
        with pytest.raises(DiskFullError, match="no space left"):
            await table.put("a", 2)
        writes.heal()
        await table.put("b", 2)
        with pytest.raises(DiskFullError, match="no space left"):
            await engine.commit(table.job, 2, {}, 2)
        await engine.roll_back(table.job, 1)
        await table.assert_at(1)
        await table.step("a", "b")
        await table.assert_at(2)


async def test_more_than_the_host_budget_is_put_in_one_step(tmp_path: Path) -> None:
    """Copies of puts that are on NVMe already are evicted for the next puts."""
    names = tuple(chr(ord("a") + number) for number in range(20))
    async with opened(tmp_path) as engine:
        table = await Table(engine, numels=dict.fromkeys(names, 200_000)).begin()
        await table.step(*names)
        await table.assert_at(1)


@pytest.mark.parametrize("moments", [TierName.NVME, TierName.HOST])
async def test_one_group_is_put_and_another_updated_in_one_step(tmp_path: Path, moments: TierName) -> None:
    layout = Layout(weights=moments, moments=moments, every_steps=0, with_skips=False)
    async with opened(tmp_path, host_budget_bytes=8 * MIB) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await training.hand_over(["block.0"])
        put = await put_state(engine, training.job, "block.1", {Kind.PARAM: 1.5, Kind.EXP_AVG: -2.0})
        gradient = await engine.pending_steps.allocate_gradient(training.job, "block.1")
        with pytest.raises(
            ConflictError, match=r"group 'block\.1' was updated in step 2 already, or a part of it was put"
        ):
            engine.pending_steps.update(training.job, 2, "block.1", gradient, lambda tile: None)
        engine.gradients.free(gradient)
        with pytest.raises(ConflictError, match=r"block\.0/param was put in step 2 already"):
            await engine.pending_steps.allocate_put(training.job, 2, "block.0", Kind.PARAM)
        await training.commit(2)
        expected = training.reference.states(2)
        before = training.reference.states(1)
        for group in layout.groups:
            for kind in layout.kinds:
                pin = await engine.pins.fetch(training.job, group, kind)
                stored = engine.host.tensor(pin.arena_range, layout.dtype(kind), pin.slab.numel).clone()
                engine.pins.unpin(pin)
                for shard in layout.group(group).shards:
                    part = stored[shard.group_offset :][: shard.numel]
                    if group == "block.1" and kind in put:
                        assert (part == put[kind]).all()
                    else:
                        source = expected if group == "block.0" else before
                        assert torch.equal(part, source[group, shard.fqn, kind])


async def put_state(engine: Engine, job: Job, group: str, values: Mapping[Kind, float]) -> Mapping[Kind, float]:
    """Put constants as the next version of some kinds of a group."""
    for kind, constant in values.items():
        slab = job.slab(group, kind)
        range_ = await engine.pending_steps.allocate_put(job, job.next_step, group, kind)
        engine.host.tensor(range_, slab.spec.dtype, slab.numel).fill_(constant)
        await engine.pending_steps.put(job, job.next_step, group, kind, range_)
    return values


async def test_a_fetch_under_way_sees_the_put_that_overtakes_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine).begin()
        for turns in range(0, 40, 4):
            for slab in table.job.slabs():
                engine.host_cache.free_copy(slab)
            fetching = asyncio.ensure_future(engine.pins.fetch(table.job, "group of b", Kind.PARAM))
            for _ in range(turns):
                await asyncio.sleep(0)
            await table.step("b")
            engine.pins.unpin(await fetching)
            await table.assert_at(table.job.next_step - 1)


async def test_a_reader_takes_the_newest_step_from_host_memory_as_long_as_it_is_there(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine).begin()
        await table.step("a", "b", "c")
        reader = await engine.step_readers.open(table.job)
        read_before = engine.nvme.counters.bytes_read
        await table.assert_reads(reader)
        assert engine.nvme.counters.bytes_read == read_before
        await table.put("b", 2)
        await table.assert_reads(reader)
        assert engine.nvme.counters.bytes_read > read_before, "the copy is of the newer step now"
        await table.commit("b")
        await table.assert_reads(reader)
        reader.close()


async def test_a_range_is_brought_into_the_arena_as_the_reader_reads_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine).begin()
        reader = await engine.step_readers.open(table.job)
        await table.step("a", "b", "c")
        for offset, numel in ((0, 70_016), (0, 70_000), (8192, 8192), (8191, 30_000), (70_000, 16), (16_384, 53_632)):
            assert await reader.describe("b", Kind.PARAM, offset, numel) is DType.BFLOAT16

            async def fill(view: memoryview, offset: int = offset, numel: int = numel) -> None:
                await reader.fill("b", Kind.PARAM, offset, numel, view)

            range_ = await engine.step_readers.load(table.job, numel * 2, fill)
            stored = engine.host.tensor(range_, DType.BFLOAT16, numel)
            assert torch.equal(stored, value("b", 0)[offset : offset + numel])
            engine.scratch.free(range_)
        with pytest.raises(NotFoundError, match="no element 70016 of 'b'"):
            await reader.describe("b", Kind.PARAM, 70_000, 32)
        with pytest.raises(BudgetExceededError, match="cannot hold one range"):
            await engine.step_readers.load(table.job, 1 << 40, fill)
        reader.close()
        with pytest.raises(NotFoundError, match="is closed"):
            await engine.step_readers.load(table.job, 100, fill)
