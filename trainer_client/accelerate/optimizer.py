"""The optimizer that `Accelerator.prepare` returns: Accelerate's wrapper around the engine's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from trainer_client.engine.engine import Engine


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's optimizer, whose `step` makes a step of the engine where Accelerate synchronises gradients.

    Accelerate's schedulers ask it whether the last step was skipped.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Make a step, unless the micro-batch is not the last one of its step. All ranks must call this.

        Raises:
            RuntimeError: there is no gradient, or a closure was given.
        """
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._is_overflow = not self._engine.was_step_applied()
