"""The optimizer as a kernel: a function that the storage engine calls for each tile of a group.

The kernel unscales and clips the gradient, updates the weight and the states of each shard, and rounds the new weight
to the parameter's type. This module must never know where the bytes of a tile come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.update import update_shards
from paramserver.vocabulary import KIND_TO_WIRE
from storage.base.shard import OPTIMIZER_STATES, Kind, Shard
from storage.steps.tile import UpdateTile


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """The kernel that updates one group of shards in one step. The engine calls it for each tile of the group.

    Attributes:
        shards: the shards of the group, by their offsets in it.
        hyper_parameters: one entry per shard; a shard with None is not updated.
        grad_scale, clip_value: see `update_shards`, which gets the gradient converted to fp32.
    """

    shards: Sequence[Shard]
    hyper_parameters: Sequence[HyperParameters | None]
    grad_scale: float
    clip_value: float | None = None

    def __call__(self, tile: UpdateTile) -> None:
        """Update weight and states of a tile in place, and the low-precision parameter from the master weight."""
        gradient = tile.scratch
        gradient.copy_(tile.gradient)
        low_precision = Kind.MASTER in tile.tensors
        weight = tile.tensors[Kind.MASTER if low_precision else Kind.PARAM]
        update_shards(
            ((s.group_offset, s.numel, row) for s, row in zip(self.shards, self.hyper_parameters, strict=True)),
            weight,
            gradient,
            {KIND_TO_WIRE[kind]: state for kind, state in tile.tensors.items() if kind in OPTIMIZER_STATES},
            grad_scale=self.grad_scale,
            clip_value=self.clip_value,
            start=tile.start,
        )
        if low_precision:
            tile.tensors[Kind.PARAM].copy_(weight)
