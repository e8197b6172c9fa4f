"""Checks for the transforms of torch.func, such as `grad` and `vmap`, in which tensors have no storage.

This module owns nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def is_transformed() -> bool:
    """Return whether this call is made within a transform of torch.func, such as `grad` or `vmap`."""
    return torch._C._are_functorch_transforms_active()


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no transform runs, for gathers, because transforms refuse to fill flat buffers."""
    return temporarily_clear_interpreter_stack() if is_transformed() else nullcontext()
