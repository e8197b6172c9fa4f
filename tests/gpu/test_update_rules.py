"""The update rules that a trainer applies on a CUDA device give the same bits as torch's fused optimizers there."""

from __future__ import annotations

import pytest
import torch

from paramserver.contract.optimizers.registry import apply
from paramserver.vocabulary import KIND_TO_WIRE
from tests.optimizer_cases import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

NUMEL = 100_003


@pytest.mark.parametrize("name", CASES)
def test_rules_on_a_cuda_device_equal_torch_bit_for_bit(name: str) -> None:
    case = CASES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(NUMEL, generator=generator, device="cuda")
    reference = weight.clone().requires_grad_()
    optimizer = case.reference([reference])
    states = {KIND_TO_WIRE[kind]: torch.zeros_like(weight) for kind in case.states}
    for step in range(1, 5):
        gradient = torch.randn(NUMEL, generator=generator, device="cuda")
        reference.grad = gradient.clone()
        optimizer.step()
        apply(case.row(step), [weight], [gradient], {kind: [state] for kind, state in states.items()})

    assert torch.equal(weight, reference.detach())
    for kind, state in case.states.items():
        assert torch.equal(states[KIND_TO_WIRE[kind]], optimizer.state[reference][state]), kind
