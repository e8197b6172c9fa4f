"""Number formats: the dtypes of forward and backward, and the loss scale that keeps fp16 gradients in range.

This module owns the loss scale. It must never touch parameters or gradients: its callers apply the dtypes and the loss
scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from trainer_client.config.precision import Fp16Section
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.reduction_dtypes import mark_reduction_dtypes, marked_dtype

# The settings of a dynamic loss scale under autocast. They are those of torch.amp.GradScaler: an overflow halves the
# scale at once, and 2 000 steps without an overflow double it.
_AUTOCAST_SCALE = Fp16Section(
    enabled=True, initial_scale_power=16, loss_scale_window=2000, hysteresis=1, min_loss_scale=0.0
)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """The dtypes of forward and backward. The optimizer's states and the master weights always are fp32.

    Attributes:
        compute_dtype: the dtype of the parameters, and of the root's floating-point inputs; None: each parameter keeps
            its own dtype, and inputs stay as they are.
        accumulation_dtype: the dtype of gradients between micro-batches; None: the dtype of their parameter.
        reduction_dtype: the dtype in which gradients are added over ranks; None: the dtype of their parameter. Under
            autocast, parameters may be marked with another one; see model/reduction_dtypes.py.
        autocast_dtype: the dtype of `torch.autocast` around the forward; None: the engine does not enter it.
        autocast_reduced: the classes of modules whose gradients are added over ranks in autocast's dtype.
        buffer_dtype: the dtype of the model's floating-point buffers; None: each buffer keeps its own dtype.
    """

    compute_dtype: torch.dtype | None
    accumulation_dtype: torch.dtype | None = None
    reduction_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    autocast_reduced: tuple[str, ...] = ()
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: TrainingConfig) -> PrecisionPolicy:
        """Return the dtypes that a config asks for, under `bf16`, `fp16`, `torch_autocast` and the like."""
        compute_dtype = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
        return cls(
            compute_dtype=compute_dtype,
            accumulation_dtype=_dtype(config.data_types.grad_accum_dtype),
            reduction_dtype=_dtype(config.communication_data_type),
            autocast_dtype=_dtype(config.torch_autocast.dtype) if config.torch_autocast.enabled else None,
            autocast_reduced=config.torch_autocast.reduced_classes if config.torch_autocast.enabled else (),
            buffer_dtype=_dtype(config.data_types.buffer_dtype),
        )

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context for a forward on `device`: torch.autocast, or a context that does nothing without it."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast_dtype)

    def mark_reductions(self, model: nn.Module) -> None:
        """Mark the parameters whose gradients are added over ranks in autocast's dtype. It can raise ConfigError."""
        mark_reduction_dtypes(model, self.autocast_dtype, self.autocast_reduced)

    def reduction_dtype_of(self, parameter: ModelParameter) -> torch.dtype:
        """Return the dtype in which a parameter's gradient is added over ranks.

        It raises ConfigError in the same cases as `dtype_of`.
        """
        return marked_dtype(parameter.tensor) or self.reduction_dtype or self.dtype_of(parameter)

    def dtype_of(self, parameter: ModelParameter) -> torch.dtype:
        """Return the dtype in which the model computes with a parameter.

        Raises:
            ConfigError: the config sets no dtype, and the parameter cannot keep its own.
        """
        if self.compute_dtype is not None:
            return self.compute_dtype
        if (dtype := parameter.tensor.dtype) not in _DTYPES.values():
            raise ConfigError(
                f"parameter {parameter.fqn} has dtype {dtype}: convert the model with .float() or .bfloat16(), or "
                "write bf16.enabled"
            )
        return dtype


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else _DTYPES[name]


def cast_floating_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Return `inputs` (any pytree) with its floating-point tensors in `dtype`; complex and integer tensors stay."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, inputs)


class LossScaler:
    """DeepSpeed's loss scale for fp16: static, or halved on overflow and doubled after `loss_scale_window` good steps.

    An overflow first uses up the patience (`hysteresis`), and only then halves the scale. A doubling restores the
    patience, or, with `consecutive_hysteresis`, every good step does. In bf16 and fp32 the scale is always 1.

    As in DeepSpeed 0.19.6, the first good step, of the run or after an overflow, does not count for the window: with a
    window of 2, the good steps 3, 5, 7, ... double the scale. torch's GradScaler counts that step, too: 2, 4, 6, ...

    The engine's optimizer shows this object under `loss_scaler`, as DeepSpeed's optimizer does, so the object has
    DeepSpeed's names for its values, too.

    Attributes:
        is_enabled: whether training is in fp16, or under autocast in fp16.
        scale: the number that a loss is multiplied by before its backward pass.
        dynamic: whether overflows and good steps change the scale.
        scale_window: the number of counted good steps after which the scale doubles.
        min_scale: the lower limit of a dynamic scale.
        cur_iter: the number of steps so far, skipped ones included; it stays 0 for a static scale.
    """

    def __init__(self, section: Fp16Section, *, counts_first: bool = False) -> None:
        """Begin with the scale of the config.

        Args:
            counts_first: whether the first good step counts for the window, as it does with torch's GradScaler.
        """
        self.is_enabled = section.enabled
        self.dynamic = section.enabled and section.loss_scale == 0
        self.scale_window = section.loss_scale_window
        self.min_scale = section.min_loss_scale
        self.cur_iter = 0
        self._hysteresis = section.hysteresis
        self._is_consecutive = section.consecutive_hysteresis
        self._patience = section.hysteresis
        self._good_steps = 0
        self._uncounted_steps = 0 if counts_first else 1
        if not section.enabled:
            self.scale = 1.0
        else:
            self.scale = 2.0**section.initial_scale_power if self.dynamic else section.loss_scale

    @classmethod
    def of(cls, config: TrainingConfig) -> LossScaler:
        """Return the loss scaler that a config asks for, with the scale that a new job begins with."""
        autocast = config.torch_autocast
        needs_scale = autocast.enabled and autocast.dtype == "fp16" and not config.fp16.enabled
        return cls(_AUTOCAST_SCALE, counts_first=True) if needs_scale else cls(config.fp16)

    @property
    def cur_scale(self) -> float:
        """The number that a loss is multiplied by, under DeepSpeed's name for it."""
        return self.scale

    @property
    def loss_scale(self) -> float:
        """The number that a loss is multiplied by, under the second name that DeepSpeed has for it."""
        return self.scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, in fp32 unless the scale is 1."""
        return loss if self.scale == 1.0 else loss.float() * self.scale

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale to a step that was made, or was skipped because its gradient was not finite (`overflow`)."""
        if not self.dynamic:
            return
        self.cur_iter += 1
        if overflow:
            self._good_steps = 0
            if self._patience > 1:
                self._patience -= 1
            else:
                self.scale = max(self.scale / 2.0, self.min_scale)
            return
        self._good_steps += 1
        counted = self._good_steps - self._uncounted_steps
        doubles = counted > 0 and counted % self.scale_window == 0
        if doubles or self._is_consecutive:
            self._patience = self._hysteresis
        if doubles:
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and its counters, which a commit carries so that a resumed run goes on with them."""
        return {
            "scale": self.scale,
            "patience": self._patience,
            "good_steps": self._good_steps,
            "steps": self.cur_iter,
            "dynamic": self.dynamic,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a commit if the scale is dynamic, and was dynamic when the commit was made.

        If either scale is not dynamic, the scale stays as the config says, because, for example, the scale of 1 of a
        run in bf16 would be far too small for fp16.
        """
        # Commits of earlier versions lack the entries "dynamic" and "steps". Their scale counts as dynamic, and their
        # number of good steps stands for the number of steps.
        if self.dynamic and state.get("dynamic", True):
            self.scale = float(state["scale"])
            self._patience = int(state["patience"])
            self._good_steps = int(state["good_steps"])
            self.cur_iter = int(state.get("steps", self._good_steps))
