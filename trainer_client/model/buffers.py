"""The dtype of a model's buffers. This module owns nothing; must never change a buffer that is not floating-point."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Give all floating-point buffers of a model a dtype, unless `dtype` is None.

    Modules that share a buffer share its copy, too. Integer, boolean and complex buffers stay as they are.
    """
    if dtype is None:
        return
    # The buffers themselves are kept beside their copies, so that no other tensor gets the id of one of them.
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point() or buffer.dtype == dtype:
                continue
            _, module._buffers[name] = copies.setdefault(id(buffer), (buffer, buffer.to(dtype)))
