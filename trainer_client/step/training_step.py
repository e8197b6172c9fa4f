"""The arithmetic of one step: norm, clipping, loss scale, and the optimizer's update of everything that has a gradient.

Owns the counts of updates and of skipped steps. Must never commit: whether and when a step is kept is the engine's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_client.optimizers.hyper_parameters import HyperParameterTable
from trainer_client.optimizers.optimizer import StoreOptimizer
from trainer_client.precision import LossScaler
from trainer_client.step.gradients import Gradients
from trainer_client.step.updates import UpdateRule, Updates

log = logging.getLogger(__name__)

# torch.nn.utils.clip_grad_norm_'s.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """At most one of the two; `norm` 0 and `value` None mean none."""

    norm: float = 0.0
    value: float | None = None

    def factor(self, norm: torch.Tensor) -> torch.Tensor:
        """What clipping by norm multiplies gradients with, in the fp32 arithmetic of `clip_grad_norm_`."""
        if self.norm > 0:
            return torch.clamp(self.norm / (norm + _CLIP_EPSILON), max=1.0)
        return torch.ones((), dtype=torch.float32)


class TrainingStep:
    """Attributes:
    update_counts: by parameter of the model, its updates so far.
    skipped, skipped_in_row: steps that were not made because the gradient was not finite.
    gradient_norm: the last step's, over all ranks, before clipping; None before the first.
    """

    def __init__(
        self,
        *,
        gradients: Gradients,
        updates: Updates,
        optimizer: StoreOptimizer,
        scaler: LossScaler,
        clipping: Clipping,
        parameters: int,
    ) -> None:
        self.update_counts = [0] * parameters
        self.skipped = 0
        self.skipped_in_row = 0
        self.gradient_norm: float | None = None
        self._gradients = gradients
        self._updates = updates
        self._optimizer = optimizer
        self._scaler = scaler
        self._clipping = clipping

    def make(self, step: int) -> bool:
        """Updates the states to version `step`, or discards the gradients; whether it was made. A collective: the ranks
        decide alike."""
        self._gradients.complete(step)
        norm = self._gradients.norm()
        unscaled = norm.total / self._scaler.scale
        self.gradient_norm = float(unscaled)
        finite = math.isfinite(self.gradient_norm)
        if finite:
            scale = float(self._clipping.factor(unscaled) / self._scaler.scale)
            with self._optimizer.stepping_with(lambda: self._update(step, scale, norm.present)):
                self._optimizer.step()
            self.skipped_in_row = 0
        else:
            self._gradients.discard()
            self.skipped += 1
            self.skipped_in_row += 1
        self._scaler.update(overflow=not finite)
        return finite

    def refresh(self) -> None:
        """Makes the parameters on this rank's device those of the step. A collective, after the ranks' votes for it."""
        self._updates.refresh()

    def _update(self, step: int, scale: float, present: Sequence[bool]) -> None:
        group_of = self._optimizer.groups_of_parameters()
        # What is in no parameter group has a gradient, which counts for the norm, and stays as it is.
        updated = [is_present and index in group_of for index, is_present in enumerate(present)]
        for index, is_updated in enumerate(updated):
            self.update_counts[index] += is_updated
        table = HyperParameterTable(group_of, self._optimizer.row, self.update_counts)
        rule = UpdateRule(scale=scale, clip_value=self._clipping.value, updated=updated, table=table)
        self._updates.apply(step, self._gradients.hand_over(updated), rule)
