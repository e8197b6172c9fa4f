"""A tensor is cut into chunks that cover it once, each contiguous and of limited size."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_client.exchange.dcp_format import chunks_of


@pytest.mark.parametrize(
    ("shape", "most", "count"),
    [((), 4, 1), ((0, 3), 4, 1), ((7,), 3, 3), ((5, 3), 100, 1), ((5, 3), 7, 3), ((3, 5, 2), 4, 9), ((2, 9), 4, 6)],
)
def test_chunks_cover_the_tensor_in_the_order_of_its_memory(shape: tuple[int, ...], most: int, count: int) -> None:
    numbered = torch.arange(math.prod(shape)).view(shape)
    chunks = list(chunks_of(shape, most))
    cut = [
        numbered[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        for offsets, sizes in chunks
    ]
    assert len(chunks) == count
    assert torch.equal(torch.cat([chunk.reshape(-1) for chunk in cut]), numbered.reshape(-1))
    assert all(math.prod(sizes) <= most for _, sizes in chunks)
