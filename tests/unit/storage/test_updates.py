"""Training through the engine gives torch's bits, on any tier and with any durability."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.base.codec import TILE_QUANTUM
from storage.base.shard import DType, Kind, TierName
from storage.steps.tile import Kernel, UpdateTile
from tests.unit.storage.builders import ROOM_FOR_TILED, TILED, Layout, Training, opened

STEPS = 6
NVME, HOST = TierName.NVME, TierName.HOST


@pytest.mark.parametrize("precision", list(DType))
@pytest.mark.parametrize("every_steps", [1, 3, 0], ids=["step", "snapshot:3", "none"])
@pytest.mark.parametrize(("weights", "moments"), [(NVME, NVME), (HOST, HOST), (NVME, HOST), (HOST, NVME)])
async def test_every_kind_of_every_shard_equals_fused_adamw_bit_for_bit(
    tmp_path: Path, precision: DType, every_steps: int, weights: TierName, moments: TierName
) -> None:
    layout = Layout(numels=TILED, precision=precision, every_steps=every_steps, weights=weights, moments=moments)
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, layout).begin()
        for step in range(1, STEPS + 1):
            assert await training.step() is (every_steps == 1)
            # The weights are read in every step, as by a forward, and the other states at the end.
            for group in layout.groups:
                pin = await engine.pins.fetch(training.job, group, Kind.PARAM)
                assert pin.copy.step == step
                engine.pins.unpin(pin, next_use=float(step))
        await training.assert_at(STEPS)
        assert engine.host.used_bytes < engine.host.budget_bytes


async def test_the_table_above_has_groups_of_several_tiles_and_odd_ends(tmp_path: Path) -> None:
    layout, tiles = Layout(numels=TILED), set[tuple[int, int]]()

    def noting(kernel: Kernel) -> Kernel:
        def run(tile: UpdateTile) -> None:
            tiles.add((tile.start, tile.numel))
            kernel(tile)

        return run

    assert all(numel % 16 for numel in layout.numels[:2])
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, layout).begin()
        await training.hand_over(wrap=noting)
        await training.commit(1)
    last = layout.group("g").numel - 2 * TILE_QUANTUM
    assert tiles == {(0, TILE_QUANTUM), (TILE_QUANTUM, TILE_QUANTUM), (2 * TILE_QUANTUM, last)}
    assert 0 < last < TILE_QUANTUM


@pytest.mark.parametrize("numels", [(1,), (15,), (16,), (2048,), (65_536,), (65_537,), (131_072, 1, 16, 31)])
async def test_sizes_around_the_edges_of_pages_and_tiles(tmp_path: Path, numels: tuple[int, ...]) -> None:
    layout = Layout(numels=numels, precision=DType.BFLOAT16, with_skips=False)
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, layout).begin()
        for _ in range(3):
            await training.step()
        await training.assert_at(3)
