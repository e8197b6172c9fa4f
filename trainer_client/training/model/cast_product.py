"""Matrix products under autocast that keep no cast copy of the weight from the forward to the backward.

Autograd keeps the operands of a product for its backward. Under autocast, the operands are copies in the lower
precision. If a layer computes with one tile of its weight after the other, the copies of all tiles together would have
half the size of the whole weight, and tiles are to avoid such memory. So the products here keep the weight itself, as
without autocast, and cast it again in the backward. All tiles share one cast copy of their input. This module must
never know what a tile is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast computes a linear layer on the device; None outside of autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def cast_of(input: torch.Tensor, weight_dtype: torch.dtype) -> torch.Tensor | None:
    """Return a product's input, without gradient, in the dtype in which autocast computes the product.

    Return None if autocast would cast neither the input nor the weight.
    """
    dtype = autocast_dtype(input.device)
    if dtype is None or torch.float64 in (input.dtype, weight_dtype) or input.dtype is weight_dtype is dtype:
        return None
    return input.detach().to(dtype)


def linear(
    input: torch.Tensor, cast: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `functional.linear` of `cast`, in its dtype; autograd gives `input`, `weight` and `bias` their gradients.

    Args:
        input: [..., features]. It gets the gradient that `cast` would get, converted to the dtype of `input`.
        cast: [..., features], the input in the dtype of the computation. No gradient of it is computed.
        weight: [outputs, features].
        bias: [outputs].
    """
    output: torch.Tensor = _CastLinear.apply(input, cast, weight, bias)  # type: ignore[no-untyped-call]
    return output


class _CastLinear(torch.autograd.Function):
    """The autograd function behind `linear`. It keeps the weight, and casts it in the forward and in the backward.

    So no cast copy of the weight stays in memory between the two.
    """

    @staticmethod
    def forward(
        input: torch.Tensor, cast: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(cast, weight.to(cast.dtype), None if bias is None else bias.to(cast.dtype))

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        output: torch.Tensor,
    ) -> None:
        input, cast, weight, bias = inputs
        ctx.save_for_backward(cast, weight)
        ctx.input_dtype = input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cast, weight = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = (gradient @ weight.to(cast.dtype)).to(ctx.input_dtype)
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[2]:
            of_weight = (rows.t() @ cast.reshape(-1, cast.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(dim=0).to(ctx.bias_dtype)
        return of_input, None, of_weight, of_bias
