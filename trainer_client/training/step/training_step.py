"""The arithmetic of one step: norm, clipping, loss scale, and the optimizer's update of everything that has a gradient.

This module owns the counts of updates and of skipped steps. It must never commit: the engine decides whether and when a
step is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer_client.errors import ConfigError, UnusedParameterError
from trainer_client.optimizers.hyper_parameters import HyperParameterTable
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.step.early_updates import EarlyUpdates
from trainer_client.training.step.gradients import Gradients
from trainer_client.training.step.in_place import InPlaceChanges
from trainer_client.training.step.precision import LossScaler
from trainer_client.training.step.updates import UpdateRule, Updates
from trainer_client.training.store_optimizer import StoreOptimizer

log = logging.getLogger(__name__)

# The epsilon that torch.nn.utils.clip_grad_norm_ adds to the norm of the gradient before it divides by the norm.
_CLIP_EPSILON = 1e-6
# A larger `clip_value` than this one clips no gradient, because elements are fp32. torch and the store refuse such a
# value, so a larger `clip_value` is replaced by None.
_LARGEST_LIMIT = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """The clipping of gradients, by their norm or by the value of each element, but not by both.

    Attributes:
        norm: the largest 2-norm; 0: no clipping by norm.
        value: the largest magnitude of an element; None: no clipping by value.
    """

    norm: float = 0.0
    value: float | None = None

    def factor(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the factor (0-D, fp32) by which clipping by norm multiplies gradients of this norm.

        The factor is computed as in torch's `clip_grad_norm_`.
        """
        if self.norm > 0:
            return torch.clamp(self.norm / (norm + _CLIP_EPSILON), max=1.0)
        return torch.ones((), dtype=torch.float32)


class TrainingStep:
    """Makes the training steps of one engine, one at a time: measures and clips the gradient, and updates the states.

    Args:
        early: the early updates, the same object that `gradients` and `updates` have.
        changes: finds the parameters that the script has changed in place.
        begins_early: whether the store may begin with updates in the backward pass.
        parameters: how many parameters the model has.
        required: the parameters of which a step must have a gradient, as long as they are trained. If one has none on
            any rank, `make` raises UnusedParameterError.

    Attributes:
        update_counts: for each parameter of the model, how often it was updated so far.
        skipped: how many steps were skipped because the gradient was not finite.
        skipped_in_row: how many steps were skipped since the last step that was made.
        gradient_norm: the norm of the last step's gradient over all ranks, before clipping; None before the first step.
        made_norm: the same norm, of the last step that was made and not skipped; 0 if there was none.
    """

    def __init__(
        self,
        *,
        gradients: Gradients,
        updates: Updates,
        optimizer: StoreOptimizer,
        scaler: LossScaler,
        clipping: Clipping,
        early: EarlyUpdates,
        changes: InPlaceChanges,
        begins_early: bool,
        parameters: int,
        required: Sequence[ModelParameter] = (),
    ) -> None:
        self.update_counts = [0] * parameters
        self.skipped = 0
        self.skipped_in_row = 0
        self.gradient_norm: float | None = None
        self.made_norm = 0.0
        self._gradients = gradients
        self._updates = updates
        self._optimizer = optimizer
        self._scaler = scaler
        self._clipping = clipping
        self._early = early
        self._changes = changes
        self._begins_early = begins_early
        self._required = required
        # The clipping that the user has chosen for the step under way; None if the user has chosen none, so that the
        # config's clipping is used.
        self._chosen: Clipping | None = None
        # The clipping of the last step. `begin_backward` assumes that the next step is clipped in the same way, so that
        # its update can begin early.
        self._last = clipping
        # Whether the gradient of the last step was clipped by its norm. If so, the next one will probably be clipped,
        # too, by a factor that is known only after the backward pass. So no update begins early.
        self._clips = clipping.norm > 0

    def go_on_from(self, *, update_counts: Sequence[int], skipped: int, skipped_in_row: int) -> None:
        """Set the counts of updates and skipped steps to those that a commit carried, because a run resumes from it."""
        self.update_counts = list(update_counts)
        self.skipped = skipped
        self.skipped_in_row = skipped_in_row

    def begin_backward(self, step: int, *, is_last: bool) -> None:
        """Foresee the update of `step`, so that the store can begin with it in the backward pass that begins now.

        Args:
            is_last: whether the pass is the last one of the step, and reduces gradients as the backwards of units end.
                If not, the store begins with no update in this pass.
        """
        rule = None
        # The changes that the script has made to parameters in place are put into the store when the step is made, and
        # an early update of a changed parameter is withdrawn then. A final early update cannot be withdrawn, so no
        # final early update begins while there are such changes.
        begins_early = is_last and self._begins_early and not self._clips and self._can_update()
        if begins_early and not (self._early.are_final and self._changes.find_own()):
            group_of = self._optimizer.groups_of_parameters()
            present = [True] * len(self.update_counts)
            rule = self._rule(self._scale(torch.ones((), dtype=torch.float32)), self._last.value, group_of, present)
        self._updates.foresee(step, rule)

    def _can_update(self) -> bool:
        """Return whether a step can be made with the parameter groups as they are now; `Engine.step` says why not."""
        try:
            self._optimizer.check_groups()
        except ConfigError:
            return False
        return True

    def make(self, step: int) -> bool:
        """Update the states to version `step`, or free the gradients if they are not finite.

        All ranks must call this, and all make the same decision.

        Returns:
            Whether the step was made.

        Raises:
            UnusedParameterError: no rank has a gradient of a parameter that is required; on all ranks.
        """
        self._gradients.finish_reductions(step)
        norm = self._gradients.norm()
        if unused := [p.fqn for p in self._required if p.tensor.requires_grad and not norm.present[p.index]]:
            raise UnusedParameterError(
                f"no gradient came for {', '.join(unused)} in this step, and "
                "zero_optimization.ignore_unused_parameters is false: use these parameters in forward, freeze them, or "
                "set the key to true"
            )
        unscaled = norm.total / self._scaler.scale
        self.gradient_norm = float(unscaled)
        finite = math.isfinite(self.gradient_norm)
        self._last, self._chosen = self._chosen or self._clipping, None
        if finite:
            self.made_norm = self.gradient_norm
            factor = self._last.factor(unscaled)
            self._clips = bool(factor != 1.0)
            self._optimizer.make_step(lambda: self._update(step, self._scale(factor), norm.present))
            self.skipped_in_row = 0
        else:
            self._gradients.free()
            self.skipped += 1
            self.skipped_in_row += 1
        self._scaler.update(overflow=not finite)
        return finite

    def reduce_gradients(self, step: int) -> None:
        """Reduce the gradients of `step` that backward passes have left unreduced. All ranks must call this."""
        self._gradients.finish_reductions(step)

    def clip_by_norm(self, step: int, limit: float) -> float:
        """Clip the gradient of `step` by its norm when the step is made, and return that norm.

        All ranks must call this. It can raise PhaseError.
        """
        self._early.require_kept("engine.clip_grad_norm_() was called")
        self._choose(Clipping(norm=limit))
        self._gradients.finish_reductions(step)
        self._gradients.make_norms_exact()
        return float(self._gradients.norm().total / self._scaler.scale)

    def clip_by_value(self, limit: float) -> None:
        """Limit the magnitude of each element of the gradient to `limit` when the step under way is made."""
        self._choose(Clipping(value=limit))

    def _choose(self, clipping: Clipping) -> None:
        """Clip the step under way by `clipping`, not by the config's values. Raise RuntimeError for a second call."""
        if self._chosen is not None:
            raise RuntimeError("the gradient of this step is clipped already: clip it once, by its norm or by value")
        self._chosen = clipping

    def drop_gradients(self) -> None:
        """Free the gradients of the step under way and withdraw its early updates, because the step begins anew."""
        self._chosen = None
        self._gradients.free()

    def require_revisable(self, change: str) -> None:
        """Raise PhaseError if a final update has begun that would have to be made again because of the `change`."""
        self._early.require_revisable(change)

    def withdraw_early_updates(self) -> None:
        """Have the store undo the updates that began in the backward pass, because the states change.

        The gradients stay, so the updates are made again in the step.
        """
        self._updates.withdraw_early()

    def abandon(self, *, is_voted_for: bool = False) -> None:
        """Release all that the step holds, after a failure that the caller reports; see Updates.abandon."""
        self._updates.abandon(is_voted_for=is_voted_for)
        self._gradients.abandon()

    def refresh(self) -> None:
        """Bring the parameters on this rank's device up to date with the step. All ranks must call this.

        Call this after all ranks have voted for the step.
        """
        self._updates.refresh()

    def _update(self, step: int, scale: float, present: Sequence[bool]) -> None:
        """Count the update of each parameter that is `present`, and have Updates make these updates."""
        rule = self._rule(scale, self._last.value, self._optimizer.groups_of_parameters(), present)
        for index, is_updated in enumerate(rule.updated):
            self.update_counts[index] += is_updated
        self._updates.apply(step, self._gradients.groups_to_update(rule.updated), rule)

    def _scale(self, factor: torch.Tensor) -> float:
        """Return the factor of all gradients: clipping by norm and unscaling in one, rounded to fp32."""
        return float(factor / self._scaler.scale)

    def _rule(
        self, scale: float, clip_value: float | None, group_of: Mapping[int, int], present: Sequence[bool]
    ) -> UpdateRule:
        """Return the rule of the next update, for the parameters that are `present`, which have a gradient."""
        # A parameter that is in no parameter group may have a gradient. This gradient counts for the norm, but the
        # parameter is not updated.
        updated = [is_present and index in group_of for index, is_present in enumerate(present)]
        counts = [count + is_updated for count, is_updated in zip(self.update_counts, updated, strict=True)]
        table = HyperParameterTable(group_of, self._optimizer.row, counts)
        if clip_value is not None and clip_value > _LARGEST_LIMIT:
            clip_value = None
        return UpdateRule(scale=scale, clip_value=clip_value, updated=updated, table=table)
