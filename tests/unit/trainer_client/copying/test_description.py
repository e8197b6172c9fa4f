"""The compact form of a slab comes to the places of its shards, with zeros between them, however it is cut."""

from __future__ import annotations

import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.copying.description import StoredSlab

SHARDS = [(5, 16), (16, 32), (7, 64)]


@pytest.mark.parametrize("part", [1, 12, 20, 1000])
@pytest.mark.parametrize("shards", [SHARDS, [(48, 0)], []])
def test_a_lease_is_filled_in_order_and_whole(shards: list[tuple[int, int]], part: int) -> None:
    group = pb.ShardGroup(name="g", numel=96, shards=[pb.Shard(fqn="x", numel=n, position=at) for n, at in shards])
    slab = StoredSlab(group=group, kind=pb.KIND_PARAM, dtype=torch.float32, version=1)
    values = torch.arange(1, sum(n for n, _ in shards) + 1, dtype=torch.float32)
    compact = values.view(torch.uint8)
    assert slab.size_bytes == compact.numel()

    filled = torch.full((slab.lease_bytes,), 255, dtype=torch.uint8)
    end = 0
    for at, data in slab.expand(compact[i : i + part] for i in range(0, len(compact), part)):
        assert at == end
        filled[at : at + len(data)] = data
        end = at + len(data)

    assert end == slab.lease_bytes == 384
    expected = torch.zeros(96)
    for start, (numel, position) in zip(
        (sum(n for n, _ in shards[:i]) for i in range(len(shards))), shards, strict=True
    ):
        expected[position : position + numel] = values[start : start + numel]
    assert torch.equal(filled.view(torch.float32), expected)
