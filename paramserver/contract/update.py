"""The update of a group of shards, which the daemon makes on tiles and a trainer on its whole chunk.

The bits of a training run rest on both doing the same: each shard is a call of its own of the optimizer's rule, because
torch's kernels round the last elements of a call differently, so that each parameter must end where the unsharded one
ends (see limits.ELEMENT_ALIGNMENT).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from paramserver.contract.optimizers.optimizer import HyperParameters, States
from paramserver.contract.optimizers.registry import apply


class Placed(Protocol):
    """A shard, as the storage engine and the trainer have it: where it lies in its group, in elements."""

    @property
    def position(self) -> int: ...

    @property
    def numel(self) -> int: ...


def update_shards(
    shards: Iterable[tuple[Placed, HyperParameters | None]],
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    *,
    grad_scale: float,
    clip_value: float | None,
    start: int = 0,
) -> None:
    """Unscale and clip the gradient, then update weight and states of each shard, all in place.

    Args:
        shards: each with its hyper-parameters; None leaves the shard as it is.
        weight: [n] fp32, the group's elements from `start` on, which may be a part of the group.
        gradient: [n] fp32; overwritten.
        states: [n] fp32 each.
        grad_scale: multiplies the gradient first.
        clip_value: clamps each element of the product to +-`clip_value`; None does not.
    """
    if grad_scale != 1.0:
        gradient.mul_(grad_scale)
    if clip_value is not None:
        gradient.clamp_(-clip_value, clip_value)
    end = start + weight.numel()
    for shard, row in shards:
        first, last = max(shard.position, start), min(shard.position + shard.numel, end)
        if row is None or first >= last:
            continue
        part = slice(first - start, last - start)
        apply(row, weight[part], gradient[part], {kind: state[part] for kind, state in states.items()})
