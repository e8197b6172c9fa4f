"""The update of a group of shards, which the daemon runs on tiles and a trainer on its whole partition.

Both must give the same bits. So both give the optimizer's rule one tensor for each shard: torch's kernels round the
last elements of a tensor differently, so each tensor must end where a parameter ends (see limits.ELEMENT_ALIGNMENT).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paramserver.contract.kinds import Kind
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.optimizers.registry import apply


def update_shards(
    shards: Iterable[tuple[int, int, HyperParameters | None]],
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: Mapping[Kind, torch.Tensor],
    *,
    grad_scale: float,
    clip_value: float | None,
    start: int = 0,
) -> None:
    """Unscale and clip the gradient, then update weight and states of each shard, all in place.

    Args:
        shards: for each shard its first element in the group, its number of elements and its hyper-parameters. A shard
            whose hyper-parameters are None is not updated.
        weight: [n] fp32, the group's elements from `start` on; they may be a part of the group. Updated in place.
        gradient: [n] fp32; overwritten.
        states: [n] fp32 each.
        grad_scale: a factor that the gradient is first multiplied by.
        clip_value: clamps each element of the product to +-`clip_value`. None if the gradient is not clamped.
    """
    if grad_scale != 1.0:
        gradient.mul_(grad_scale)
    if clip_value is not None:
        gradient.clamp_(-clip_value, clip_value)
    end = start + weight.numel()
    # `shards` has the same object for all shards with equal hyper-parameters. So shards are grouped by the id of that
    # object, and each group is updated in one call.
    alike: dict[int, tuple[HyperParameters, list[slice]]] = {}
    for offset, numel, row in shards:
        first, last = max(offset, start), min(offset + numel, end)
        if row is not None and first < last:
            alike.setdefault(id(row), (row, []))[1].append(slice(first - start, last - start))
    for row, parts in alike.values():
        cut = {kind: [state[part] for part in parts] for kind, state in states.items()}
        apply(row, [weight[part] for part in parts], [gradient[part] for part in parts], cut)
