"""Released parameters: they keep shape and dtype but have no values, and a call that needs the values is intercepted.

This module owns the behaviour of a released parameter as an argument of torch's functions. It must never let a function
read values of a released parameter.

[Note: the class of a released parameter] torch calls `__torch_function__` of an argument's class. A parameter therefore
has the class `ReleasedParameter` while it is released, and its own class while it is gathered. So a use of a gathered
parameter costs nothing more. torch also changes the class of the uninitialised parameters of lazy modules
(`UninitializedTensorMixin.materialize`).
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

# The attributes of a tensor that return its values or views of its values. Reading one of them is a use of a released
# parameter. All other attributes can be read without the values.
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


# Functions that need a parameter's place in autograd's graph, and not its values, so a released parameter allows them.
# But if autograd never gives the parameter a gradient, because it is tiled, these functions are refused: their hooks
# would never be called.
_FOR_GRADIENTS = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.autograd.grad}
)


OnAccess: TypeAlias = Callable[[str], AbstractContextManager[Callable[[Any], None]] | None]


@dataclass(frozen=True, slots=True)
class _Original:
    """What a `ReleasedParameter` keeps, so that `restore` and uses of its values are possible.

    Attributes:
        cls: the class that the parameter had before its release.
        on_access: called before a function of torch uses the parameter's values; see `release`.
        has_gradient: whether autograd gives the parameter gradients.
    """

    cls: type[nn.Parameter]
    on_access: OnAccess
    has_gradient: bool


class ReleasedParameter(UnavailableParameter):
    """A parameter without values. If a function of torch needs them, `on_access` first gathers them, or raises."""

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
                # Each argument's class is checked only when its turn comes, because gathering one parameter gathers its
                # whole unit, and parameters that are gathered are no ReleasedParameter any more.
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
        """Return what `repr` returns, because a released parameter has no number that could be formatted."""
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
    call `restore` with the parameter, or raise an error. If the values are needed for this one call of the function
    only, `on_access` may return a context. The context is entered around the call, and gives a function that is called
    with the result and may raise an error. If `has_gradient` is False, `on_access` is also called for functions that
    ask for the parameter's gradient, such as hooks on it.
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
