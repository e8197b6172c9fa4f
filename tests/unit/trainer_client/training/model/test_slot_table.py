"""The slot table of a flat group gives every element one owner, and cuts the buffer at multiples of 16 elements.

The ranks' partitions, one behind the other in rank order, are the buffer.
"""

from __future__ import annotations

import pytest

from paramserver.contract.limits import ELEMENT_ALIGNMENT
from trainer_client.training.model.slot_table import PAGE_ELEMENTS, PAGED_PARTITION, make_slot_table

SIZES = [("a", 5), ("b", 1000), ("c", 16), ("d", 1), ("e", 0), ("f", 333)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 200])
def test_every_element_has_exactly_one_owner(world_size: int) -> None:
    table = make_slot_table(SIZES, world_size)
    owned: dict[str, list[tuple[int, int]]] = {fqn: [] for fqn, _ in SIZES}
    for rank in range(world_size):
        for shard in table.shards_of(rank):
            owned[shard.fqn].append((shard.offset, shard.offset + shard.numel))

    for fqn, numel in SIZES:
        ends = [0, *(stop for _, stop in owned[fqn])]
        assert [start for start, _ in owned[fqn]] == ends[:-1]
        assert ends[-1] == numel


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_cut_is_aligned(world_size: int) -> None:
    table = make_slot_table(SIZES, world_size)

    assert table.partition_numel % ELEMENT_ALIGNMENT == 0
    assert table.numel == table.partition_numel * world_size
    for rank in range(world_size):
        for shard in table.shards_of(rank):
            assert shard.offset % ELEMENT_ALIGNMENT == 0
            assert shard.partition_offset % ELEMENT_ALIGNMENT == 0
            slot = table.slots[shard.slot]
            assert slot.offset + shard.offset == rank * table.partition_numel + shard.partition_offset


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_large_partitions_are_whole_pages_at_little_cost(world_size: int) -> None:
    numel = world_size * PAGED_PARTITION + 5
    table = make_slot_table([("a", numel), ("b", 1)], world_size)

    assert table.partition_numel % PAGE_ELEMENTS == 0
    assert numel < table.numel < 1.004 * numel
    assert make_slot_table([("a", numel)], 1).numel == numel + 11, (
        "a rank alone has no other's partition beside its own"
    )


def test_padding_is_less_than_16_elements_per_rank_and_parameter() -> None:
    table = make_slot_table(SIZES, 4)

    assert table.numel < sum(numel for _, numel in SIZES) + ELEMENT_ALIGNMENT * (len(SIZES) + 4)
