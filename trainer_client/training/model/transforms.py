"""The transforms of torch.func, such as `grad` and `vmap`, in which tensors have no storage. Pure functions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def is_transformed() -> bool:
    """Return whether a transform of torch.func runs."""
    return torch._C._are_functorch_transforms_active()


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no transform runs, because a transform refuses to fill and to free a flat buffer."""
    return temporarily_clear_interpreter_stack() if is_transformed() else nullcontext()
