"""The backward passes of an engine: what surrounds each of them.

`engine.backward(loss)` starts a pass, and so does the user's own `loss.backward()`, of which the hooks learn by the
first gradient that comes. Owns the plan of a pass: which step its gradients are for, whether they are reduced, and by
which factor they are scaled. Must never call autograd or a hook.
"""

from __future__ import annotations

import torch

from trainer_client.run.commits import Commits
from trainer_client.run.micro_batches import MicroBatches
from trainer_client.step.hooks import BackwardPlan
from trainer_client.step.precision import LossScaler
from trainer_client.step.training_step import TrainingStep


class BackwardPasses:
    """The backward passes of one engine, one at a time."""

    def __init__(self, step: TrainingStep, scaler: LossScaler, micro_batches: MicroBatches, commits: Commits) -> None:
        self._step = step
        self._scaler = scaler
        self._micro_batches = micro_batches
        self._commits = commits
        # Whether the user has multiplied the loss of the next pass by the loss scale.
        self._is_scaled = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for a pass that the user starts."""
        self._is_scaled = True
        return self._scaler.scaled(loss)

    def begin(self) -> BackwardPlan:
        """Begin the pass of `engine.backward`, whose loss is scaled by its caller. A collective."""
        self._is_scaled = False
        return self._begin(gradient_factor=1.0)

    def begin_for_user(self) -> BackwardPlan:
        """Begin a pass that the user has started. A collective.

        The gradients are divided by the accumulation steps, because the user's loss is not.

        Raises:
            RuntimeError: fp16 training needs a scaled loss, and this one is not.
        """
        is_scaled, self._is_scaled = self._is_scaled, False
        if self._scaler.is_enabled and not is_scaled:
            raise RuntimeError(
                "Loss scaling is required in fp16, and the loss of loss.backward() is not scaled: call "
                "engine.backward(loss) or engine.scale(loss).backward()"
            )
        return self._begin(gradient_factor=1.0 / self._micro_batches.sizes.accumulation)

    def end(self) -> None:
        """Count a pass that has ended well."""
        self._micro_batches.end_backward()

    def _begin(self, *, gradient_factor: float) -> BackwardPlan:
        is_last, reduces = self._micro_batches.is_last, self._micro_batches.reduces
        if is_last and reduces:
            # The store prepares one step at a time. By now it has made the last one, for which the forward has waited.
            self._commits.wait()
        self._step.begin_backward(self._commits.next, is_last=is_last and reduces)
        return BackwardPlan(step=self._commits.next, reduces=reduces, gradient_factor=gradient_factor)
