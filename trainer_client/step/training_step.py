"""The arithmetic of one step: norm, clipping, loss scale, and the optimizer's update of everything that has a gradient.

Owns the counts of updates and of skipped steps. Must never commit: whether and when a step is kept is the engine's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer_client.optimizers.hyper_parameters import HyperParameterTable
from trainer_client.step.gradients import Gradients
from trainer_client.step.precision import LossScaler
from trainer_client.step.updates import UpdateRule, Updates
from trainer_client.store_optimizer import StoreOptimizer

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
        early_updates: bool,
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
        self._early_updates = early_updates
        self._clips = clipping.norm > 0  # whether the last step's gradient was clipped by its norm
        gradients.on_final = updates.begin_early

    def begin_backward(self, step: int, *, is_last: bool) -> None:
        """A backward pass begins.

        Args:
            is_last: of the step; its gradients are reduced as units end.
        """
        rule = None
        if is_last and self._early_updates and not self._clips:
            group_of = self._optimizer.groups_of_parameters()
            rule = self._rule(self._scale(torch.ones(())), group_of, [True] * len(self.update_counts))
        self._updates.foresee(step, rule)

    def make(self, step: int) -> bool:
        """Updates the states to version `step`, or discards the gradients; whether it was made. A collective: the ranks
        decide alike."""
        self._gradients.complete(step)
        norm = self._gradients.norm()
        unscaled = norm.total / self._scaler.scale
        self.gradient_norm = float(unscaled)
        finite = math.isfinite(self.gradient_norm)
        if finite:
            factor = self._clipping.factor(unscaled)
            self._clips = bool(factor != 1.0)
            with self._optimizer.stepping_with(lambda: self._update(step, self._scale(factor), norm.present)):
                self._optimizer.step()
            self.skipped_in_row = 0
        else:
            self._updates.withdraw(self._gradients.updated_early)
            self._gradients.discard()
            self.skipped += 1
            self.skipped_in_row += 1
        self._scaler.update(overflow=not finite)
        return finite

    def abandon(self, *, is_voted_for: bool = False) -> None:
        """Give back all that the step holds, after a failure that the caller reports; see Updates.abandon."""
        self._updates.abandon(is_voted_for=is_voted_for)
        self._gradients.abandon()

    def refresh(self) -> None:
        """Makes the parameters on this rank's device those of the step. A collective, after the ranks' votes for it."""
        self._updates.refresh()

    def _update(self, step: int, scale: float, present: Sequence[bool]) -> None:
        rule = self._rule(scale, self._optimizer.groups_of_parameters(), present)
        for index, is_updated in enumerate(rule.updated):
            self.update_counts[index] += is_updated
        self._updates.apply(step, self._gradients.hand_over(rule.updated), rule)

    def _scale(self, factor: torch.Tensor) -> float:
        """What gradients are multiplied by: clipping by norm and unscaling in one, rounded to fp32."""
        return float(factor / self._scaler.scale)

    def _rule(self, scale: float, group_of: Mapping[int, int], present: Sequence[bool]) -> UpdateRule:
        """The next update of the parameters that are `present`."""
        # What is in no parameter group has a gradient, which counts for the norm, and stays as it is.
        updated = [is_present and index in group_of for index, is_present in enumerate(present)]
        counts = [count + is_updated for count, is_updated in zip(self.update_counts, updated, strict=True)]
        table = HyperParameterTable(group_of, self._optimizer.row, counts)
        return UpdateRule(scale=scale, clip_value=self._clipping.value, updated=updated, table=table)
