"""The optimizer that `Accelerator.prepare` returns: Accelerate's wrapper around the engine's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from trainer_client.engine.engine import Engine


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that scripts get from `prepare`: its `step` makes the engine's training step.

    It does so only after the last micro-batch of a step, so a script may call `step` after each micro-batch.

    Accelerate's schedulers ask this object whether the last step was skipped, and then skip theirs.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Make a training step if the micro-batch is the last one of its step. All ranks must call this.

        Raises:
            RuntimeError: there is no gradient, or a closure was given.
        """
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._is_overflow = not self._engine.was_step_applied()
