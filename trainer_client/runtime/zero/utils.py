"""DeepSpeed's `deepspeed.runtime.zero.utils`: whether a parameter is one of stage 3."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_zero_param"]


def is_zero_param(parameter: Any) -> bool:
    """Return whether a tensor has DeepSpeed's attributes of stage 3, as `ds_shape`, because it may have no values."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
