"""Released parameters: they keep shape and dtype but have no values, and a function that needs the values is noticed.

This module owns the behaviour of a released parameter as an argument of torch's functions. It must never let its values
be read as if it had some.

[Note: the class of a released parameter] torch calls `__torch_function__` of an argument's class. A parameter therefore
has the class `ReleasedParameter` while it is released, and its own class while it is gathered, so that it costs nothing
then. torch does the same with the uninitialised parameters of lazy modules (`UninitializedTensorMixin.materialize`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer_client.training.model.availability import UnavailableParameter, ZeroParamStatus, show_status
from trainer_client.training.model.taken_gradients import require_gradient

# The attributes of a tensor that return its values or views of its values. All other attributes of a released parameter
# can be read.
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
        torch.Tensor.untyped_storage,  # This does no harm, because the storage of a released parameter is one NaN.
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    }
)


# A hook on the gradient of a parameter to which autograd gives none would never be called. `torch.autograd.grad` takes
# a parameter for its place in the graph, and not for its values.
_FOR_GRADIENTS = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.autograd.grad}
)


OnAccess: TypeAlias = Callable[[str], AbstractContextManager[Callable[[Any], None]] | None]


@dataclass(frozen=True, slots=True)
class _Original:
    """What a parameter was before its release.

    Attributes:
        cls: its class.
        on_access: the callback for a use of its values.
        has_gradient: whether autograd gives the parameter gradients.
    """

    cls: type[nn.Parameter]
    on_access: OnAccess
    has_gradient: bool


class ReleasedParameter(UnavailableParameter):
    """A parameter without values. A function of torch that needs them first lets `on_access` gather them, or fails."""

    _paramserver_original: _Original

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, is_attribute = _name_of(func)
        if is_attribute and name == "grad" and isinstance(args[0], ReleasedParameter):
            require_gradient(args[0])
        without_values = func in _METADATA or func in _FOR_GRADIENTS
        if name not in _VALUES if is_attribute else without_values and not _is_in_vain(func, (args, kwargs)):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with ExitStack() as reads:
            checks = []
            for argument in tree_leaves((args, kwargs)):
                # The class is looked up for each argument, because gathering one parameter gathers its whole unit.
                if isinstance(argument, ReleasedParameter):
                    read = argument._paramserver_original.on_access(name)
                    if read is not None:
                        checks.append(reads.enter_context(read))
            result = func(*args, **kwargs)
            for check in checks:
                check(result)
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(released, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, format_spec: str) -> str:
        """Return what `repr` returns, because there is no number to format."""
        return format(repr(self), format_spec)


def _is_in_vain(func: Callable[..., Any], arguments: Any) -> bool:
    """Return whether a function asks for gradients of a parameter to which autograd gives none."""
    return func in _FOR_GRADIENTS and not all(
        argument._paramserver_original.has_gradient
        for argument in tree_leaves(arguments)
        if isinstance(argument, ReleasedParameter)
    )


def release(parameter: nn.Parameter, on_access: OnAccess, *, has_gradient: bool = True) -> None:
    """Make the parameter a `ReleasedParameter`; idempotent.

    Before a function of torch gets the parameter's values, `on_access` is called with the function's name. It has to
    call `restore` with the parameter, or raise. For a use that ends with the function it returns a context around the
    call, whose value is called with the result and may raise. Without `has_gradient`, this is so for hooks on its
    gradient, too.
    """
    if not isinstance(parameter, ReleasedParameter):
        show_status(parameter, ZeroParamStatus.AVAILABLE)
        parameter._paramserver_original = _Original(type(parameter), on_access, has_gradient)  # type: ignore[attr-defined]
        parameter.__class__ = ReleasedParameter


def restore(parameter: nn.Parameter) -> None:
    """Give the parameter the class back that it had before `release`; idempotent."""
    if isinstance(parameter, ReleasedParameter):
        parameter.__class__ = parameter._paramserver_original.cls  # type: ignore[assignment]
        del parameter._paramserver_original


def _name_of(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return the name of a function of torch and False, or of the attribute that it gets or sets and True."""
    if type(func).__name__ == "method-wrapper":
        return str(func.__self__.__name__), True  # type: ignore[attr-defined]
    return str(getattr(func, "__name__", func)), False
