"""AdamW on tiles, by torch's fused CPU kernel (Loshchilov & Hutter, arXiv:1711.05101; torch.optim.AdamW)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from storage.shard import Kind, Shard
from storage.transform import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWHyperParameters:
    """torch.optim.AdamW's. `update_count` is the number of updates of the parameter, this one included."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    update_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWUpdate:
    """The update of one group. `hyper_parameters` has one entry per shard; None leaves the shard as it is.

    The gradient is converted to fp32 and multiplied by `grad_scale` first.
    """

    shards: Sequence[Shard]
    hyper_parameters: Sequence[AdamWHyperParameters | None]
    grad_scale: float

    def __call__(self, tile: Tile) -> None:
        """Updates weight and moments of the tile in place, and the low-precision parameter from the master weight."""
        gradient = tile.scratch
        gradient.copy_(tile.gradient).mul_(self.grad_scale)
        low_precision = Kind.MASTER in tile.tensors
        weight = tile.tensors[Kind.MASTER if low_precision else Kind.PARAM]
        end = tile.start + tile.numel
        # Not the tile as a whole: the kernel rounds the last elements of a call differently (see ELEMENT_ALIGNMENT), so
        # each parameter must end where the unsharded one ends.
        for shard, hyper in zip(self.shards, self.hyper_parameters, strict=True):
            first, last = max(shard.position, tile.start), min(shard.position + shard.numel, end)
            if hyper is None or first >= last:
                continue
            part = slice(first - tile.start, last - tile.start)
            adamw(
                [weight[part]],
                [gradient[part]],
                [tile.tensors[Kind.EXP_AVG][part]],
                [tile.tensors[Kind.EXP_AVG_SQ][part]],
                [],
                # torch increments the count before it uses it.
                [torch.tensor(float(hyper.update_count - 1))],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                lr=hyper.lr,
                weight_decay=hyper.weight_decay,
                eps=hyper.eps,
            )
        if low_precision:
            tile.tensors[Kind.PARAM].copy_(weight)
