"""bf16 products that are emulated in fp32 equal torch's bf16 products, up to the order of sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.training import bf16_emulation
from benchmarks.training.models import batches, build
from benchmarks.training.task import TrainingTask


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run one backward pass and return the gradients by parameter name, and the loss under "loss"."""
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found | {"loss": loss.detach()}


def test_a_model_has_the_same_gradients_up_to_rounding() -> None:
    task = TrainingTask(layers=2, hidden=64, vocab=64, batch=2, tokens=16)
    model = build(task).to(torch.bfloat16)
    tokens = next(batches(task))
    own = gradients(model, tokens)
    with bf16_emulation.in_fp32():
        ours = gradients(model, tokens)
    assert ours.keys() == own.keys()
    for name, values in ours.items():
        assert values.dtype == torch.bfloat16 or name == "loss"
        scale = own[name].float().abs().max()
        torch.testing.assert_close(values.float(), own[name].float(), rtol=0.0, atol=0.02 * float(scale), msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    left, right = torch.randn(5, 7, dtype=dtype), torch.randn(7, 3, dtype=dtype)
    own = left @ right
    with bf16_emulation.in_fp32():
        assert torch.equal(left @ right, own)


def test_a_product_is_the_rounded_one_of_fp32_and_torchs_own_afterwards() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(96, 96, generator=generator).bfloat16() for _ in range(2))
    bias = torch.randn(96, generator=generator).bfloat16()
    own = torch.addmm(bias, left, right)
    with bf16_emulation.in_fp32():
        assert torch.equal(left @ right, (left.float() @ right.float()).bfloat16())
        scaled = torch.addmm(bias, left, right, beta=2, alpha=0.5)
        assert torch.equal(scaled, torch.addmm(bias.float(), left.float(), right.float(), beta=2, alpha=0.5).bfloat16())
        into = torch.empty(0, dtype=torch.bfloat16)
        assert torch.mm(left, right, out=into) is into and torch.equal(into, left @ right)
    assert torch.equal(torch.addmm(bias, left, right), own)
