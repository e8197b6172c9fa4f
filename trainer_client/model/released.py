"""Parameters whose memory is given back: shape and dtype stay, and whoever asks for a value is noticed.

Owns what a released parameter does when torch is handed it. Must never let its values be read as if it had some.

[Note: the class of a released parameter] torch calls `__torch_function__` of an argument's class. While it is released
a parameter therefore has the class `ReleasedParameter`, and its own again while it is gathered, when it costs nothing:
as torch does it with the uninitialised parameters of lazy modules (`UninitializedTensorMixin.materialize`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# Attributes that are values, or views of them; all others may be looked at.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})

_METADATA = frozenset(
    {
        torch.Tensor.__hash__,
        torch.Tensor.__len__,
        torch.Tensor.dim,
        torch.Tensor.element_size,
        torch.Tensor.get_device,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.ndimension,
        torch.Tensor.nelement,
        torch.Tensor.numel,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.requires_grad_,
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.untyped_storage,  # how much memory there is; a NaN
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    }
)


@dataclass(frozen=True, slots=True)
class _Original:
    """What a released parameter was, and whom to tell that somebody wants it."""

    cls: type[nn.Parameter]
    want: Callable[[str], None]


class ReleasedParameter(nn.Parameter):
    """A parameter without values: the first function of torch that needs them has it gathered, or is refused."""

    _paramserver_original: _Original

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, is_attribute = _name_of(func)
        if name not in _VALUES if is_attribute else func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for argument in tree_leaves((args, kwargs)):
            # Gathering one gathers its whole unit: the next one may be there already.
            if isinstance(argument, ReleasedParameter):
                argument._paramserver_original.want(name)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(released, shape={tuple(self.shape)}, dtype={self.dtype})"


def release(parameter: nn.Parameter, want: Callable[[str], None]) -> None:
    """From now on `want` is called, with the name of a function of torch, before that function gets the parameter; it
    must `restore` the parameter or raise. Idempotent."""
    if not isinstance(parameter, ReleasedParameter):
        parameter._paramserver_original = _Original(type(parameter), want)  # type: ignore[attr-defined]
        parameter.__class__ = ReleasedParameter


def restore(parameter: nn.Parameter) -> None:
    """The parameter is what it was before `release`. Idempotent."""
    if isinstance(parameter, ReleasedParameter):
        parameter.__class__ = parameter._paramserver_original.cls  # type: ignore[assignment]
        del parameter._paramserver_original


def _name_of(func: Callable[..., Any]) -> tuple[str, bool]:
    """The name of a function of torch, or of the attribute that it gets or sets; whether it is an attribute's."""
    if type(func).__name__ == "method-wrapper":
        return str(func.__self__.__name__), True  # type: ignore[attr-defined]
    return str(getattr(func, "__name__", func)), False
