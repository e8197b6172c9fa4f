"""The optimizer as a kernel on tiles: unscales and clips the gradient, updates each parameter, rounds the weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.update import update_shards
from paramserver.vocabulary import KIND_TO_WIRE
from storage.shard import OPTIMIZER_STATES, Kind, Shard
from storage.transform import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """The update of one group. `hyper_parameters` has one entry per shard; None leaves the shard as it is.

    The gradient is converted to fp32 and multiplied by `grad_scale` first, then clamped to +-`clip_value` if given.
    """

    shards: Sequence[Shard]
    hyper_parameters: Sequence[HyperParameters | None]
    grad_scale: float
    clip_value: float | None = None

    def __call__(self, tile: Tile) -> None:
        """Updates weight and states of the tile in place, and the low-precision parameter from the master weight."""
        gradient = tile.scratch
        gradient.copy_(tile.gradient)
        low_precision = Kind.MASTER in tile.tensors
        weight = tile.tensors[Kind.MASTER if low_precision else Kind.PARAM]
        update_shards(
            zip(self.shards, self.hyper_parameters, strict=True),
            weight,
            gradient,
            {KIND_TO_WIRE[kind]: state for kind, state in tile.tensors.items() if kind in OPTIMIZER_STATES},
            grad_scale=self.grad_scale,
            clip_value=self.clip_value,
            start=tile.start,
        )
        if low_precision:
            tile.tensors[Kind.PARAM].copy_(weight)
