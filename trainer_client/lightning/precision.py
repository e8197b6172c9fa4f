"""Lightning's calls for the backward pass, the clipping and the step, which are passed on to the engine.

This module must never change a dtype: the engine enters autocast around its forward, and casts parameters and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainer_client.engine.engine import Engine


class EnginePrecision(Precision):
    """A precision plug-in that calls an engine. It takes the place of the plug-in that the Trainer has made.

    Args:
        engine: the engine of the model that is trained.
        precision: the Trainer's `precision`, as Lightning writes it, for example "bf16-mixed".
    """

    def __init__(self, engine: Engine, precision: Any) -> None:
        super().__init__()
        self.precision = precision
        self._engine = engine

    def backward(self, tensor: torch.Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch, by the module's own hook `backward` if it has one.

        All ranks must call this.
        """
        if is_overridden("backward", model):
            model.backward(self._engine.scale(tensor), *args, **kwargs)
        else:
            self._engine.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (the last forward and backward), then make the training step. All ranks must call this.

        If `training_step` returns None for a micro-batch, on all ranks, the micro-batch has no gradient. If no
        micro-batch of the step has a gradient, no step is made.
        """
        result = closure()
        self._after_closure(model, optimizer)
        if result is not None or self._engine.has_gradient:
            optimizer.step(**kwargs)
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Have the engine clip the gradient of the step under way, if there is one. All ranks must call this."""
        if clip_val <= 0 or not self._engine.has_gradient:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self._engine.clip_grad_value_(float(clip_val))
        else:
            self._engine.clip_grad_norm_(float(clip_val))
