"""The names of `deepspeed.runtime.zero.partition_parameters` that programs import; most of them are those of `zero`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from trainer_client.accelerator import get_accelerator
from trainer_client.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

# transformers compares constructors with this function while it builds a model.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """Return a constructor of tensors that makes what `fn` makes, on a device and with a floating-point dtype.

    DeepSpeed's `Init` replaces torch's constructors by such ones, and transformers replaces this function while it
    builds a model, so that `torch.arange` keeps its dtype. `Init` of this library replaces no constructor, so it keeps
    that dtype without help.

    Args:
        target_fp_dtype: the dtype in place of another floating-point dtype; None: the tensor's own.
        target_device: the device, unless the caller names one; None: the default device.
    """

    @wraps(fn)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return make
