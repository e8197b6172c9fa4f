"""The attributes by which scripts for DeepSpeed find out whether a parameter has to be gathered before it is copied.

This module owns the names of these attributes: `ds_id`, `ds_status`, `ds_shape`, `ds_numel`, `ds_tensor`, `ds_persist`
and `ds_active_sub_modules`. `ds_tensor` has no values, only a shape and a dtype. `ds_persist` is always False, because
no parameter stays whole for its small size. `ds_active_sub_modules` exists because some callers clear it. This library
does not read these attributes. The module also owns the methods with which `module.to` and `module.cuda` move
parameters that were built under `zero.Init` and have no values.

[Note: how the status changes] The class of a released parameter has a property `ds_status`, which hides the attribute
of the same name that the parameter object has. So the status changes with the parameter's class, and a gather has no
attribute to set. A parameter that was built under `zero.Init` keeps its class, so its own attribute is set.
"""

from __future__ import annotations

import enum
from functools import partial
from typing import Any

import torch
from torch import nn


class ZeroParamStatus(enum.Enum):
    """The values of a parameter's attribute `ds_status`, as DeepSpeed defines them.

    Scripts compare the attribute with these values. No parameter of this library is INFLIGHT.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class UnavailableParameter(nn.Parameter):
    """The base class of `ReleasedParameter`, which makes `ds_status` of a released parameter NOT_AVAILABLE."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        return ZeroParamStatus.NOT_AVAILABLE


# The names of the methods by which torch.nn.Module moves a parameter to a device. A parameter without values gets
# attributes of these names, so that torch does not try to move it.
_MOVES = ("to", "cuda")
_ATTRIBUTES = ("ds_active_sub_modules", "ds_id", "ds_shape", "ds_numel", "ds_persist", "ds_status", "ds_tensor")


def hide_status(parameter: nn.Parameter) -> None:
    """Delete the attributes `ds_id`, `ds_status` and so on of a parameter that no engine trains; idempotent."""
    for name in _ATTRIBUTES:
        vars(parameter).pop(name, None)


def show_status(parameter: nn.Parameter, status: ZeroParamStatus) -> None:
    """Give a parameter DeepSpeed's attributes such as `ds_id`, and set its own `ds_status` to `status`.

    From now on, `module.to(device)` and `module.cuda()` move the parameter again; see `stay_on_moves`.
    """
    own = vars(parameter)
    if "ds_id" not in own:
        own.update({"ds_id": id(parameter), "ds_shape": parameter.shape, "ds_numel": parameter.numel()})
        own["ds_persist"] = False
    own["ds_status"] = status
    for name in _MOVES:
        own.pop(name, None)


def stay_on_moves(parameter: nn.Parameter) -> None:
    """Have `module.to(device)` and `module.cuda()` skip a parameter that has no values, until `show_status` is called.

    The parameter has no values that could be moved, and gets its values later where the config puts them. Without this
    function, torch would raise "Cannot copy out of meta tensor". A change of the dtype is made as torch makes it.
    """
    vars(parameter).update({"to": partial(_to, parameter), "cuda": partial(_cuda, parameter)})


def _to(parameter: nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor:
    _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return parameter if dtype is None else torch.Tensor.to(parameter, dtype)


def _cuda(parameter: nn.Parameter, *_: Any, **__: Any) -> torch.Tensor:
    return parameter


def part_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [numel] without values, which stands for this rank's part of a parameter."""
    return torch.empty(numel, dtype=dtype, device="meta")


def show_part(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Set DeepSpeed's attribute `ds_tensor`, a tensor that stands for this rank's part of the parameter."""
    vars(parameter)["ds_tensor"] = part
