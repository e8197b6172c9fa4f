"""DeepSpeed's helpers for parameters of experts. A model here has none of its MoE layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return False and 0, because no model has a layer of DeepSpeed's class MoE."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Return False, because no parameter belongs to DeepSpeed's class MoE."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the parameter groups as they are, in a list, because none of their parameters belongs to a layer MoE.

    Args:
        param_groups: one group or several.
        max_group_size: without effect, because only the groups of experts are divided.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
