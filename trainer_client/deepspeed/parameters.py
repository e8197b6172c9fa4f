"""DeepSpeed's small functions on parameters, on parameter groups, and on models and engines that have parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from trainer_client.engine.engine import Engine
from trainer_client.training.run.state_offload import DeviceState

# transformers reads this name while it builds a model, to find out whether a constructor of tensors is torch.arange.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """Return a constructor of tensors like `fn`, whose tensors are on a given device and have a given dtype.

    DeepSpeed's `Init` replaces torch's constructors by the results of this function. transformers replaces this
    function while it builds a model, so that `torch.arange` keeps its dtype. `Init` of this library replaces no
    constructor, so `torch.arange` keeps its dtype in any case.

    Args:
        target_fp_dtype: the dtype that floating-point tensors get; None: they keep the dtype that `fn` gives them.
        target_device: the device of the tensors if a call names none; None: the default device.
    """

    @wraps(fn)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return make


def is_zero_param(parameter: Any) -> bool:
    """Return whether a tensor has DeepSpeed's attributes of stage 3, such as `ds_shape`.

    Scripts ask this because such a parameter may have no values while it is not gathered.
    """
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def get_state_devices(model: Engine, state: DeviceState) -> set[torch.device]:
    """Return the devices on which this rank has a kind of state of an engine; see `Engine.state_devices`."""
    return model.state_devices(state)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return False and 0, because no model has a layer of DeepSpeed's class MoE."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Return False, because no parameter belongs to DeepSpeed's class MoE."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the parameter groups unchanged, in a list, because no parameter belongs to a layer of class MoE.

    Args:
        param_groups: one group or several.
        max_group_size: without effect, because only the groups of experts are divided.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
