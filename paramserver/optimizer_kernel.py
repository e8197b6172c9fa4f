"""The optimizer as a kernel on tiles: unscales and clips the gradient, updates each parameter, rounds the weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.contract import update_rules
from paramserver.vocabulary import KIND_TO_WIRE
from storage.shard import OPTIMIZER_STATES, Kind, Shard
from storage.transform import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """The update of one group. `hyper_parameters` has one entry per shard; None leaves the shard as it is.

    The gradient is converted to fp32 and multiplied by `grad_scale` first, then clamped to +-`clip_value` if given.
    """

    shards: Sequence[Shard]
    hyper_parameters: Sequence[update_rules.HyperParameters | None]
    grad_scale: float
    clip_value: float | None = None

    def __call__(self, tile: Tile) -> None:
        """Updates weight and states of the tile in place, and the low-precision parameter from the master weight."""
        gradient = tile.scratch
        gradient.copy_(tile.gradient)
        if self.grad_scale != 1.0:
            gradient.mul_(self.grad_scale)
        if self.clip_value is not None:
            gradient.clamp_(-self.clip_value, self.clip_value)
        low_precision = Kind.MASTER in tile.tensors
        weight = tile.tensors[Kind.MASTER if low_precision else Kind.PARAM]
        end = tile.start + tile.numel
        # Not the tile as a whole: kernels round the last elements of a call differently (see ELEMENT_ALIGNMENT), so
        # each parameter must end where the unsharded one ends.
        for shard, hyper in zip(self.shards, self.hyper_parameters, strict=True):
            first, last = max(shard.position, tile.start), min(shard.position + shard.numel, end)
            if hyper is None or first >= last:
                continue
            part = slice(first - tile.start, last - tile.start)
            states = {
                KIND_TO_WIRE[kind]: tensor[part] for kind, tensor in tile.tensors.items() if kind in OPTIMIZER_STATES
            }
            update_rules.apply(hyper, weight[part], gradient[part], states)
        if low_precision:
            tile.tensors[Kind.PARAM].copy_(weight)
