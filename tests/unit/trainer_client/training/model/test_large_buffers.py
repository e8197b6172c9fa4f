"""The size of a slab of large buffers is known without their values."""

from __future__ import annotations

import pytest
import torch

from trainer_client.training.model.large_buffers import _packed, planned_numel

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64]


@pytest.mark.parametrize("names", [[""], ["a", "b"], [f"blocks.{index}.naïve mask\n" for index in range(8)]], ids=len)
def test_the_planned_size_is_that_of_the_values(names: list[str]) -> None:
    buffers = {
        name: torch.ones(index, 10 ** (index % 4), dtype=dtype)
        for index, (name, dtype) in enumerate(zip(names, DTYPES, strict=False))
    }

    assert planned_numel({name: buffer.to("meta") for name, buffer in buffers.items()}) == _packed(buffers).numel()
