"""DeepSpeed's helpers for parameters of experts. A model here has none of its MoE layers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from trainer_client.not_built import refuse

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return False and 0, because no model has a layer of DeepSpeed's class MoE."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Return False, because no parameter belongs to DeepSpeed's class MoE."""
    return False


def split_params_into_different_moe_groups_for_optimizer(*_: Any, **__: Any) -> NoReturn:
    """Refuse the call. Raises NotBuiltError."""
    refuse(
        "split_params_into_different_moe_groups_for_optimizer()",
        "expert parallelism is not built; all parameters are divided among all ranks, so leave the groups as they are",
    )
