"""Conversions that a model of an engine refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer_client.training.model.refusals import find_conversion

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (lambda tensor: tensor.cpu(), None),
        (lambda tensor: tensor.float(), ("torch.bfloat16 on cpu", "torch.float32 on cpu")),
        (lambda tensor: tensor.half(), ("torch.float32 on cpu", "torch.float16 on cpu")),
        (lambda tensor: tensor.to("meta"), ("torch.float32 on cpu", "torch.float32 on meta")),
    ],
)
def test_the_first_conversion_is_found_and_no_tensor_is_converted(
    fn: Callable[[torch.Tensor], torch.Tensor], found: tuple[str, str] | None
) -> None:
    seen = list[int]()

    def probe(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return fn(tensor)

    assert find_conversion(probe, [torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]) == found
    assert set(seen) == {0}


def test_released_tensors_count_as_lying_where_their_values_are() -> None:
    released = [torch.ones(3, device="meta")]
    assert find_conversion(lambda tensor: tensor.cpu(), released, CPU) is None
    assert find_conversion(lambda tensor: tensor.to("meta"), released) is None
