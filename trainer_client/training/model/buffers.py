"""The values and dtypes of a model's buffers.

This module owns nothing. It must never change the dtype of a buffer that is not floating-point.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

log = logging.getLogger(__name__)


@torch.no_grad()
def give_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the buffers of a model, by name. Names or shapes that the model does not have are left out.

    A warning names each value that was left out. An expanded buffer, in whose memory one element stands for several, is
    replaced by a new tensor if the values differ.
    """
    own = dict(model.named_buffers(remove_duplicate=False))
    for name, given in values.items():
        if name not in own or own[name].shape != given.shape:
            log.warning("the stored buffer %r of shape %s is not in this model", name, list(given.shape))
        elif not _is_expanded(own[name]):
            own[name].copy_(given)
        elif not torch.equal(own[name], given.to(own[name])):
            _replace(model, own[name], given.to(own[name]))


def _is_expanded(buffer: torch.Tensor) -> bool:
    layout = zip(buffer.stride(), buffer.shape, strict=True) if buffer.layout is torch.strided else ()
    return any(stride == 0 and size > 1 for stride, size in layout)


def _replace(model: nn.Module, buffer: torch.Tensor, by: torch.Tensor) -> None:
    for module in model.modules():
        for name in [name for name, other in module._buffers.items() if other is buffer]:
            module._buffers[name] = by


@torch.no_grad()
def cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Convert all floating-point buffers of a model to a dtype, unless `dtype` is None.

    Modules that share a buffer share its converted copy, too. Integer, boolean and complex buffers stay as they are.
    """
    if dtype is None:
        return
    # For each buffer, by its id: the buffer and its converted copy. The buffer is kept, because a new tensor could get
    # the id of a buffer that was freed, and would then be taken for it.
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point() or buffer.dtype == dtype:
                continue
            _, module._buffers[name] = copies.setdefault(id(buffer), (buffer, buffer.to(dtype)))
