"""The index of a job's shards finds the same as a search through all of them."""

from __future__ import annotations

import random

import pytest

from storage.base.shard import DType, GroupSpec, Kind, Shard, SlabSpec, TierName
from storage.state.shard_index import ShardIndex
from storage.state.slab import Group
from tests.unit.storage.work import counted


def group(name: str, shards: list[tuple[str, int, int]]) -> Group:
    """Return a group with shards of these tensors, each given by its name, offset and number of elements."""
    slab = SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=TierName.NVME)
    position, placed = 0, []
    for fqn, offset, numel in shards:
        placed.append(Shard(fqn=fqn, offset=offset, numel=numel, group_offset=position))
        position += -(-numel // 16) * 16
    return Group(GroupSpec(name=name, numel=position, shards=tuple(placed), slabs=(slab,)), ())


@pytest.mark.parametrize("seed", range(20))
async def test_an_element_is_found_exactly_where_some_shard_holds_it(seed: int) -> None:
    """This holds even if shards overlap, enclose each other or leave holes, and in whatever order they are added."""
    rng = random.Random(seed)
    groups = [
        group(f"g{i}", [(rng.choice("abc"), 16 * rng.randrange(30), rng.randrange(1, 120)) for _ in range(3)])
        for i in range(12)
    ]
    index = ShardIndex()
    cut = rng.randrange(len(groups))
    await index.add(groups[:cut])
    index.add_at_once(groups[cut:])
    shards = [shard for g in groups for shard in g.spec.shards]
    for fqn in "abcd":
        for offset in range(620):
            holding = [s for s in shards if s.fqn == fqn and s.offset <= offset < s.offset + s.numel]
            found = index.locate(fqn, offset)
            assert (found is None) == (not holding)
            assert found is None or (found.shard in holding and found.shard in found.group.spec.shards)
        offsets = [placed.shard.offset for placed in index.of(fqn)]
        assert offsets == sorted(s.offset for s in shards if s.fqn == fqn)


async def test_names_come_in_order_from_any_place_on() -> None:
    names = [f"layer.{i % 7}.w{i}" for i in range(20_000)]
    random.Random(1).shuffle(names)
    index = ShardIndex()
    for start in range(0, len(names), 999):
        await index.add([group(f"g{start}", [(fqn, 0, 3) for fqn in names[start : start + 999]])])
    assert len(index) == len(names)
    assert list(index.names_from("")) == sorted(names)
    for first, prefix in (("", "layer.3"), ("layer.3.w5", "layer.3"), ("layer.9", ""), ("a", "layer.1.w1"), ("", "x")):
        expected = sorted(fqn for fqn in names if fqn >= first and fqn.startswith(prefix))
        assert list(index.names_from(first, prefix)) == expected


async def test_a_look_up_takes_no_longer_among_four_times_as_many_shards() -> None:
    lines = []
    for count in (1_000, 4_000):
        index = ShardIndex()
        await index.add([group(f"g{i}", [("whole", 16 * i, 16), (f"t{i}", 0, 3)]) for i in range(count)])
        with counted() as work:
            assert index.locate("whole", 16 * count - 1) is not None
            assert index.locate(f"t{count // 2}", 2) is not None
            assert next(index.names_from(f"t{count // 2}")) == f"t{count // 2}"
        lines.append(work.lines)
    # With four times as many shards, a bisection looks at two more of them.
    assert lines[1] <= lines[0] + 10
