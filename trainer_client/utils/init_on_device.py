"""DeepSpeed's `OnDevice`: a context in which modules make their tensors on one device, in one dtype."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """A context that sets the default device and the default dtype of tensors.

        with OnDevice(dtype=torch.bfloat16, device="meta"):
            model = Model()

    A tensor for which the model itself names a device or a dtype keeps them. A model on the meta device gets its
    initial values from its own functions in `trainer_client.initialize`; `trainer_client.zero.Init` also keeps values
    that constructors compute.

    Args:
        dtype: the dtype of floating-point tensors.
        device: the device, as torch writes it.
        enabled: False: the context does nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._context = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._context.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._context.enter_context(torch.device(self.device))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
