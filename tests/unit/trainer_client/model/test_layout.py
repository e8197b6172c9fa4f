"""The layout of a flat group gives every element one owner, and cuts the buffer at multiples of 16 elements.

The ranks' chunks, one behind the other in rank order, are the buffer.
"""

from __future__ import annotations

import pytest

from paramserver.contract.limits import ELEMENT_ALIGNMENT
from trainer_client.model.layout import PAGE_ELEMENTS, PAGED_CHUNK, flat_layout

SIZES = [("a", 5), ("b", 1000), ("c", 16), ("d", 1), ("e", 0), ("f", 333)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 200])
def test_every_element_has_exactly_one_owner(world_size: int) -> None:
    layout = flat_layout(SIZES, world_size)
    owned: dict[str, list[tuple[int, int]]] = {fqn: [] for fqn, _ in SIZES}
    for rank in range(world_size):
        for shard in layout.shards_of(rank):
            owned[shard.fqn].append((shard.offset, shard.offset + shard.numel))

    for fqn, numel in SIZES:
        ends = [0, *(stop for _, stop in owned[fqn])]
        assert [start for start, _ in owned[fqn]] == ends[:-1]
        assert ends[-1] == numel


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_cut_is_aligned(world_size: int) -> None:
    layout = flat_layout(SIZES, world_size)

    assert layout.chunk % ELEMENT_ALIGNMENT == 0
    assert layout.numel == layout.chunk * world_size
    for rank in range(world_size):
        for shard in layout.shards_of(rank):
            assert shard.offset % ELEMENT_ALIGNMENT == 0
            assert shard.position % ELEMENT_ALIGNMENT == 0
            slot = layout.slots[shard.slot]
            assert slot.position + shard.offset == rank * layout.chunk + shard.position


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_large_chunks_are_whole_pages_at_little_cost(world_size: int) -> None:
    numel = world_size * PAGED_CHUNK + 5
    layout = flat_layout([("a", numel), ("b", 1)], world_size)

    assert layout.chunk % PAGE_ELEMENTS == 0
    assert numel < layout.numel < 1.004 * numel
    assert flat_layout([("a", numel)], 1).numel == numel + 11, "a rank alone has no other's chunk beside its own"


def test_padding_is_less_than_a_chunk_unit_per_rank_and_parameter() -> None:
    layout = flat_layout(SIZES, 4)

    assert layout.numel < sum(numel for _, numel in SIZES) + ELEMENT_ALIGNMENT * (len(SIZES) + 4)
