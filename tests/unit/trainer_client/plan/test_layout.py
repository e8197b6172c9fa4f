"""A planned layout has the tiles that `initialize` would make."""

from __future__ import annotations

from torch import nn

from trainer_client.config.loading import load_config
from trainer_client.plan.layout import World, lay_out

LARGEST = 8192


def test_a_plan_cuts_large_layers_and_every_element_of_them_is_in_one_shard() -> None:
    model = nn.Sequential(nn.Embedding(101, 48), nn.Linear(48, 48), nn.Linear(48, 101, bias=False)).to("meta")
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
        "paramserver": {"tiling": {"largest_tile": LARGEST, "exclude": ["1.*"]}},
    }

    layout = lay_out(model, load_config(raw, {}), World(ranks=2))

    root, *tiles = layout.units
    assert [unit.fqn for unit in tiles] == [
        f"{name}.weight[{first}:{last}]" for name in ("0", "2") for first, last in ((0, 34), (34, 68), (68, 101))
    ]
    assert all(planned.group.slot_table.slots[0].numel * 4 <= LARGEST for tile in tiles for planned in tile.groups)
    assert {slot.fqn for planned in root.groups for slot in planned.group.slot_table.slots} == {"1.weight", "1.bias"}
    ranges: dict[str, list[tuple[int, int]]] = {}
    for group in layout.declared:
        for shard in group.shards:
            ranges.setdefault(shard.fqn, []).append((shard.offset, shard.numel))
    for name in ("0.weight", "2.weight"):
        end = 0
        for offset, numel in sorted(ranges[name]):
            assert offset == end
            assert offset % 16 == 0
            end = offset + numel
        assert end == 101 * 48
