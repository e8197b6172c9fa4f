"""Any range of a tensor can be read by name, in whatever groups, tiles and tiers it is, and always of one version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from storage.base.errors import ConflictError, NotFoundError
from storage.base.shard import DType, GroupSpec, Kind, Shard, TierName
from storage.engine import Engine
from storage.state.versions import Job
from tests.unit.storage.builders import ROOM_FOR_TILED, TILED, Layout, Training, opened

LAYOUT = Layout(numels=TILED, precision=DType.BFLOAT16, groups=("block.0",))


async def read(engine: Engine, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> torch.Tensor:
    dtype, _ = await engine.reader.describe(job, fqn, kind, offset, numel)
    data = b"".join([piece async for piece in engine.reader.read(job, fqn, kind, offset, numel)])
    return torch.frombuffer(bytearray(data), dtype=dtype.torch)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("placement", [TierName.NVME, TierName.HOST])
async def test_every_range_of_every_kind_equals_torch(tmp_path: Path, placement: TierName, resident: bool) -> None:
    layout = replace(LAYOUT, weights=placement, moments=placement)
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, layout).begin()
        for _ in range(2):
            await training.step()
        if not resident:
            await engine.end_run(training.job)
        for shard in layout.group("block.0").shards:
            for kind in layout.kinds:
                expected = training.reference.states(2)["block.0", shard.fqn, kind]
                for start, stop in [(0, shard.numel), (0, 1), (shard.numel - 1, shard.numel), (5, shard.numel)]:
                    got = await read(engine, training.job, shard.fqn, kind, start, stop - start)
                    assert torch.equal(got, expected[start:stop])
        assert await engine.reader.describe(training.job, "block.0.weight.0", Kind.PARAM, 0, 5) == (DType.BFLOAT16, 2)


async def test_a_range_that_spans_groups_is_joined(tmp_path: Path) -> None:
    """This is so if two ranks on this node have halves of a parameter."""
    whole = LAYOUT.group("block.0")

    def half(name: str, offset: int, numel: int) -> GroupSpec:
        shard = Shard(fqn="w", offset=offset, numel=numel, group_offset=0)
        return replace(whole, name=name, numel=-(-numel // 16) * 16, shards=(shard,))

    values = torch.arange(3_001, dtype=torch.float32)
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        job = await engine.open_job(LAYOUT.job(), may_exist=True, must_exist=False)
        await engine.register(job, [half("w[1600:]", 1600, 1401), half("w[:1600]", 0, 1600)])
        for group, start, stop in (("w[:1600]", 0, 1600), ("w[1600:]", 1600, 3001)):
            pin = await engine.pins.stage(job, group, Kind.MASTER)
            engine.host.tensor(pin.arena_range, DType.FLOAT32, stop - start)[:] = values[start:stop]
            await engine.pins.publish(pin)
        for start, stop in [(0, 3001), (1599, 1601), (1600, 1700), (100, 2900)]:
            assert torch.equal(await read(engine, job, "w", Kind.MASTER, start, stop - start), values[start:stop])


async def test_what_was_never_written_reads_as_zeros(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUT).begin()
        got = await read(engine, training.job, "block.0.weight.0", Kind.EXP_AVG, 3, 80_000)
        assert not got.any() and len(got) == 80_000


@pytest.mark.parametrize(
    ("fqn", "offset", "numel", "named"),
    [("nothing", 0, 1, "no element 0 of 'nothing'"), ("block.0.weight.1", 10, 8, "no element 17 of")],
)
async def test_elements_that_are_not_here_are_refused(
    tmp_path: Path, fqn: str, offset: int, numel: int, named: str
) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUT).begin()
        with pytest.raises(NotFoundError, match=named):
            await read(engine, training.job, fqn, Kind.PARAM, offset, numel)


async def test_a_slow_reader_never_gets_a_mixture_of_two_steps(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, replace(LAYOUT, numels=(480_001,))).begin()
        pieces = engine.reader.read(training.job, "block.0.weight.0", Kind.MASTER, 0, 480_001)
        first = await anext(pieces)
        assert len(first) < 480_001 * 4
        await training.step()
        with pytest.raises(ConflictError, match=r"changed while 'block\.0\.weight\.0' was read from it; read it again"):
            while await anext(pieces):
                pass
        await training.assert_at(1)


async def test_a_slow_reader_holds_no_buffer_that_an_optimizer_needs(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, replace(LAYOUT, numels=(480_001,))).begin()
        readers = [engine.reader.read(training.job, "block.0.weight.0", Kind.MASTER, 0, 480_001) for _ in range(8)]
        for reader in readers:
            await anext(reader)
        await training.step()
        for reader in readers:
            await reader.aclose()
