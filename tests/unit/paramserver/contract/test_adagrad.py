"""Adagrad where torch has no fused kernel for the device gives torch's bits for any number of weights and calls."""

from __future__ import annotations

import torch
import torch._dynamo  # Otherwise torch would import it at the first optimizer, within the test.
from torch.optim import Adagrad

from paramserver.contract.optimizers.adagrad import update_without_kernel
from paramserver.v1 import parameter_store_pb2 as pb
from tests.optimizer_cases import ADAGRAD

SIZES = (33, 5, 100)


def test_each_weight_of_each_call_has_the_rate_of_its_own_count() -> None:
    """Two groups of weights are updated one after the other in each step, as those of two units are."""
    generator = torch.Generator().manual_seed(3)
    groups = [[torch.randn(size, generator=generator) for size in SIZES] for _ in range(2)]
    references = [[weight.clone().requires_grad_() for weight in group] for group in groups]
    optimizer = Adagrad([weight for group in references for weight in group], foreach=True, **ADAGRAD)
    sums = [[torch.full_like(weight, ADAGRAD["initial_accumulator_value"]) for weight in group] for group in groups]
    for step in range(1, 4):
        values = pb.Adagrad(**ADAGRAD, update_count=step)
        for group, own, squares in zip(references, groups, sums, strict=True):
            gradients = [torch.randn(size, generator=generator) for size in SIZES]
            for weight, gradient in zip(group, gradients, strict=True):
                weight.grad = gradient.clone()
            update_without_kernel(values, own, gradients, squares)
        optimizer.step()

    for group, own in zip(references, groups, strict=True):
        assert all(torch.equal(weight.detach(), mine) for weight, mine in zip(group, own, strict=True))
