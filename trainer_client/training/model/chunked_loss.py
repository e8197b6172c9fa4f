"""The cross entropy of a large vocabulary, computed so that the logits of all tokens are never in memory at once.

This module owns the arithmetic. It must never gather: the hooks on the tiles of the head do.

[Note: chunks] The logits of a chunk of tokens over the rows of one tile are computed, reduced to two numbers for each
token, and freed. The two numbers are the logarithm of the sum of the exponentials, and the logit of the label. The
backward pass computes the logits again. Tiles are the outer loop and chunks of tokens the inner loop, so each tile is
gathered once in each pass. The gradient of the hidden states is added up over tiles in fp32, and the gradient of a tile
is added up over chunks in fp32. So only the products are rounded to the dtype of the computation, as they are without
chunks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainer_client.training.model.cast_product import autocast_dtype
from trainer_client.training.model.tiled_layers import check_range, tiled_layer_of

IGNORE_INDEX = -100


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.Tensor,
    *,
    tokens: int = 1024,
    ignore_index: int = IGNORE_INDEX,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """Return `cross_entropy(head(hidden).float(), labels)`, 0-D in fp32, without the logits of all tokens in memory.

        loss = chunked_cross_entropy(decoder(input_ids), model.lm_head, labels)

    The labels are not shifted. Under an engine, all ranks call this alike, within a forward of the model or after it.
    The loss can be differentiated once: a backward through its gradients, as for a gradient penalty, fails with torch's
    error about `once_differentiable`.

    Args:
        hidden: [..., features], the hidden states.
        head: a module that computes as `nn.Linear` does, with `weight` [vocabulary, features] and an optional `bias`.
        labels: [...], each an index of the vocabulary or `ignore_index`.
        tokens: of how many tokens logits are made at once.
        ignore_index: the label of tokens that do not count.
        reduction: "mean" over the tokens that count, or their "sum".

    Raises:
        IndexError: a label is no index of the vocabulary (on the CPU).
        ValueError: an argument does not fit.
    """
    _check(hidden, head, labels, tokens, reduction)
    # The hidden states are converted to fp32, because autograd adds up their gradients from all tiles of the head's
    # weight in their dtype.
    flat = hidden.reshape(-1, hidden.shape[-1]).float()
    targets = labels.reshape(-1).to(hidden.device)
    counts = targets != ignore_index
    rows: int = head.weight.shape[0]  # type: ignore[assignment, index]
    check_range(torch.where(counts, targets, 0), rows, f"a label is out of bounds: the head has {rows} rows")
    bias: torch.Tensor | None = getattr(head, "bias", None)
    # A label equal to `ignore_index` does not count in the loss. It is replaced by -1, which is the index of no row of
    # the head, so no tile computes a loss for it.
    targets = torch.where(counts, targets, -1)
    dtype = autocast_dtype(hidden.device) or hidden.dtype

    def compute(weight: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
        return _ReducedLogits.apply(weight, *inputs, tokens, dtype)  # type: ignore[no-untyped-call, no-any-return]

    layer = tiled_layer_of(head)
    if layer is None:
        # A released weight has no values. `view_as` counts as a use of the weight, so it makes the engine gather the
        # weight.
        weight: torch.Tensor = head.weight.view_as(head.weight)  # type: ignore[operator, arg-type]
        reduced = [compute(weight, flat, bias, targets)]
    else:
        reduced = []
        for tile in layer.used_tiles():
            part = tile.weight
            is_inside = (targets >= part.first_row) & (targets < part.last_row)
            local = torch.where(is_inside, targets - part.first_row, -1)
            reduced.append(tile.use(compute, flat, None if bias is None else bias[part.rows], local))
    sums, chosen = torch.stack(reduced).unbind(dim=1)
    total = sums.logsumexp(dim=0) - chosen.sum(dim=0)
    loss = torch.where(counts, total, 0.0).sum()
    return loss if reduction == "sum" else loss / counts.sum()


def _check(hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, tokens: int, reduction: str) -> None:
    """Raise ValueError if an argument of `chunked_cross_entropy` does not fit."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f'chunked_cross_entropy(reduction={reduction!r}): write "mean" or "sum"')
    if tokens < 1:
        raise ValueError(f"chunked_cross_entropy(tokens={tokens}): write a number of tokens from 1 on")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"chunked_cross_entropy: hidden states of shape {list(hidden.shape)} do not go with labels of shape "
            f"{list(labels.shape)}: give one label for each token"
        )
    others = {id(parameter) for parameter in head.parameters() if parameter.requires_grad}
    if others - {id(head.weight), id(getattr(head, "bias", None))}:
        raise ValueError(
            f"chunked_cross_entropy: the head is a {type(head).__name__} that has other parameters than its weight and "
            "bias, such as those of an adapter, which the loss would leave out: leave the head out of the adapter, or "
            "compute the loss from its output"
        )


class _ReducedLogits(torch.autograd.Function):
    """The autograd function that reduces the logits of some rows of the head's weight to what the loss needs.

    The logits are computed for some tokens at a time and freed. The backward pass computes them again.

    The result is [2, n] in fp32: for each token the logarithm of the sum of exponentials, and the logit of its label.

    Args:
        weight: [rows, features].
        hidden: [n, features] in fp32.
        bias: [rows].
        labels: [n] row numbers; -1: the label is none of these rows, and its logit counts as 0.
        tokens: of how many tokens logits are computed at once.
        dtype: the dtype of the matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        tokens: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, hidden, bias, labels)
        ctx.tokens, ctx.dtype = tokens, dtype
        reduced = torch.zeros(2, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        with _no_autocast(hidden.device):
            cast_weight, cast_bias = _cast(weight, dtype), None if bias is None else _cast(bias, dtype)
            for part in _chunks(hidden.shape[0], tokens):
                logits = functional.linear(_cast(hidden[part], dtype), cast_weight, cast_bias).float()
                reduced[0, part] = logits.logsumexp(dim=-1)
                reduced[1, part] = _of_labels(logits, labels[part])
        # If the biases of all rows of the head are -inf, all logits and the logarithm of the sum of their exponentials
        # are -inf, and the backward would compute -inf - (-inf), which is NaN. With 0 in place of this logarithm, the
        # exponentials are 0, as they should be.
        ctx.sums = reduced[0].masked_fill(reduced[0].isneginf(), 0.0)
        return reduced

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, hidden, bias, labels = ctx.saved_tensors
        dtype = ctx.dtype
        wants_weight, wants_hidden, wants_bias = ctx.needs_input_grad[:3]
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if wants_bias else None
        with _no_autocast(hidden.device):
            cast_weight, cast_bias = _cast(weight, dtype), None if bias is None else _cast(bias, dtype)
            for part in _chunks(hidden.shape[0], ctx.tokens):
                states = _cast(hidden[part], dtype)
                logits = functional.linear(states, cast_weight, cast_bias).float()
                logits.sub_(ctx.sums[part].unsqueeze(-1)).exp_().mul_(gradient[0, part].unsqueeze(-1))
                is_here = labels[part] >= 0
                places = labels[part].clamp(min=0).unsqueeze(-1)
                logits.scatter_add_(-1, places, torch.where(is_here, gradient[1, part], 0.0).unsqueeze(-1))
                of_logits = _cast(logits, dtype)
                if of_hidden is not None:
                    of_hidden[part] = of_logits @ cast_weight
                if of_weight is not None:
                    of_weight += of_logits.t() @ states
                if of_bias is not None:
                    of_bias += of_logits.sum(dim=0)
        return (
            None if of_weight is None else of_weight.to(weight.dtype),
            of_hidden,
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, found, 0.0)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False)
