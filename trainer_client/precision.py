"""Number formats: what forward and backward compute with, and the loss scale that keeps fp16 gradients in range.

Owns the loss scale. Must never touch parameters or gradients: it says which dtype and which factor, others apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer_client.config import Fp16Section, TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """`compute_dtype` is that of the gathered parameters and of the gradients; the optimizer's states are fp32."""

    compute_dtype: torch.dtype

    @property
    def has_master(self) -> bool:
        """Whether the weights are kept in fp32 beside the parameters that forward and backward use."""
        return self.compute_dtype != torch.float32

    @classmethod
    def of(cls, config: TrainingConfig) -> PrecisionPolicy:
        if config.bf16.enabled:
            return cls(compute_dtype=torch.bfloat16)
        return cls(compute_dtype=torch.float16 if config.fp16.enabled else torch.float32)


def cast_floating_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """`inputs` (any pytree) with its floating-point tensors in `dtype`; complex and integer tensors stay."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, inputs)


class LossScaler:
    """DeepSpeed's loss scale for fp16: static, or halved on overflow and doubled after `window` good steps.

    An overflow lowers `patience` first, and the scale only when it is used up; a doubling restores it. In bf16 and fp32
    the scale is a static 1.
    """

    def __init__(self, section: Fp16Section) -> None:
        self._dynamic = section.enabled and section.loss_scale == 0
        self._window = section.loss_scale_window
        self._hysteresis = section.hysteresis
        self._minimum = section.min_loss_scale
        self._patience = section.hysteresis
        self._good_steps = 0
        if not section.enabled:
            self.scale = 1.0
        else:
            self.scale = 2.0**section.initial_scale_power if self._dynamic else section.loss_scale

    def update(self, *, overflow: bool) -> None:
        """Takes note of a step that was made, or skipped because its gradient was not finite."""
        if not self._dynamic:
            return
        if overflow:
            self._good_steps = 0
            if self._patience > 1:
                self._patience -= 1
            else:
                self.scale = max(self.scale / 2.0, self._minimum)
            return
        self._good_steps += 1
        if self._good_steps % self._window == 0:
            self._patience = self._hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "patience": self._patience, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state over where the scale is dynamic; a static scale is the config's."""
        if self._dynamic:
            self.scale = float(state["scale"])
            self._patience = int(state["patience"])
            self._good_steps = int(state["good_steps"])
