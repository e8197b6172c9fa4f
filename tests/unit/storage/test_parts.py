"""An update verifies, computes and records a tile part by part, and damage in one part does not affect the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from storage.base import syscalls
from storage.base.errors import DamagedBlockError
from storage.base.shard import DType, Kind, TierName
from storage.engine import Engine
from storage.state.slab import Slab
from storage.steps import tile
from tests.unit.storage.builders import Layout, Training, on_nvme, opened

MOMENTS = [TierName.NVME, TierName.HOST]
PART_ELEMENTS = 65_536
PART_BYTES = 4 * PART_ELEMENTS
# A tile has at most 262144 elements. A group has one tile of four parts and one of two parts, the last of them short.
NUMELS = (240_003, 17, 96_000)
LARGE: dict[str, Any] = {"host_budget_bytes": 64 << 20, "nvme_budget_bytes": 64 << 20}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "PART_ELEMENTS", PART_ELEMENTS)


def states(training: Training, kind: Kind) -> Slab:
    return next(slab for slab in training.job.slabs() if slab.key.kind is kind)


async def trained(engine: Engine, moments: TierName) -> Training:
    """Return a job after its first step, with the weights on NVMe only."""
    training = await Training(engine, Layout(numels=NUMELS, precision=DType.BFLOAT16, moments=moments)).begin()
    await training.step()
    for slab in training.job.slabs():
        if slab.copy is not None and not slab.copy.at_home:
            engine.host_cache.free_copy(slab)
    return training


class WrongReads:
    """A fault: the next `times` reads of one place in the data file return a wrong byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: int, times: int) -> None:
        self.left = times
        self._place = place
        self._real: Callable[..., None] = syscalls.read_exact
        monkeypatch.setattr(syscalls, "read_exact", self._read)

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        self._real(fd, buffers, offset, path)
        for buffer in buffers:
            if offset <= self._place < offset + len(buffer) and self.left:
                self.left -= 1
                buffer[self._place - offset] ^= 1
            offset += len(buffer)


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("moments", MOMENTS)
async def test_bytes_that_were_wrong_once_are_read_again_and_the_rest_is_not_updated_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: TierName, part: int
) -> None:
    async with opened(tmp_path, **LARGE) as engine:
        training = await trained(engine, moments)
        master = states(training, Kind.MASTER)
        (extent,) = on_nvme(master.source(1)).extents
        wrong = WrongReads(monkeypatch, extent.offset + part * PART_BYTES + 5, times=1)
        await training.step()
        assert wrong.left == 0
        await training.assert_at(2)
        assert engine.nvme.damaged_blocks == 0


async def test_two_wrong_kinds_of_a_part_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, **LARGE) as engine:
        training = await trained(engine, TierName.NVME)
        wrong = [
            WrongReads(
                monkeypatch, on_nvme(states(training, kind).source(1)).extents[0].offset + 3 * PART_BYTES, times=1
            )
            for kind in (Kind.MASTER, Kind.EXP_AVG_SQ)
        ]
        await training.step()
        assert [reads.left for reads in wrong] == [0, 0]
        await training.assert_at(2)


@pytest.mark.parametrize("part", [0, 2, 5])
async def test_bytes_that_stay_wrong_are_named_set_aside_and_nothing_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    async with opened(tmp_path, **LARGE) as engine:
        training = await trained(engine, TierName.NVME)
        master = states(training, Kind.MASTER)
        place = on_nvme(master.source(1)).extents[0].offset + part * PART_BYTES
        wrong = WrongReads(monkeypatch, place, times=1 << 30)
        with pytest.raises(DamagedBlockError, match=r"master at step 1") as raised:
            await training.step()
        assert raised.value.fqns and raised.value.offset == part * PART_BYTES
        assert engine.nvme.damaged_blocks == 1
        assert any(bad.offset <= place < bad.end for bad in engine.nvme.bad)
        wrong.left = 0
        await engine.roll_back(training.job, 1)
        await training.assert_at(1)
