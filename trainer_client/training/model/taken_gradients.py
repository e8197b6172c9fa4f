"""Gradients that the engine has taken from `.grad`: a read of `.grad` between backward and step raises an error.

If such a read returned None, torch's functions would pass over the parameter, so `clip_grad_norm_` would clip nothing
and return 0. This module owns the class of a parameter from a backward pass to the step. It must never hold a gradient.

[Note: the class of a parameter whose gradient was taken] This class is a subclass of the parameter's own class with
another `grad`. The parameter gets its own class back before each forward, so that torch.compile sees no other class,
and before each step.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from trainer_client.errors import TakenGradientError

# A parameter whose gradient the engine has taken has the attribute _NAME, with the parameter's FQN. If the parameter
# also gets another class, that class has the attribute _OWN_CLASS, with the parameter's own class.
_NAME, _OWN_CLASS = "_paramserver_taken", "_paramserver_own_class"
# torch returns this number as that of the current graph task (a backward pass) if no backward pass is under way.
_NO_GRAPH_TASK = -1
# torch's descriptor of a tensor's `.grad`, which reads and writes the gradient past the replaced class. torch's stubs
# declare the descriptor as a tensor, so its type is Any here.
_GRAD: Any = torch.Tensor.grad


def hide_gradient(parameter: nn.Parameter, fqn: str, *, is_released: bool) -> None:
    """Make each use of the parameter's `.grad` an error, until `show_gradient`. Idempotent.

    Args:
        is_released: whether the parameter is released after each use. It then keeps its class, because the class of
            released parameters calls `require_gradient` itself.
    """
    vars(parameter)[_NAME] = fqn
    if not is_released and not hasattr(type(parameter), _OWN_CLASS):
        parameter.__class__ = _without_gradient(type(parameter))


def require_gradient(parameter: torch.Tensor) -> None:
    """Raise TakenGradientError if the gradient of a parameter was taken, and no backward pass is under way."""
    if _NAME in vars(parameter) and torch._C._current_graph_task_id() == _NO_GRAPH_TASK:
        raise TakenGradientError(vars(parameter)[_NAME])


def show_gradient(parameter: nn.Parameter) -> None:
    """Let the parameter's `.grad` be read and set again after `hide_gradient`; idempotent."""
    vars(parameter).pop(_NAME, None)
    if (own := own_class(parameter)) is not type(parameter):
        parameter.__class__ = own


def own_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that a parameter has without `hide_gradient`."""
    own: type[nn.Parameter] = getattr(type(parameter), _OWN_CLASS, type(parameter))
    return own


@functools.cache
def _without_gradient(own: type[nn.Parameter]) -> type[nn.Parameter]:
    def read(parameter: nn.Parameter) -> torch.Tensor | None:
        # `require_gradient` allows reads of `.grad` during a backward pass, because a hook of the script may read the
        # gradient that autograd has made at this moment.
        require_gradient(parameter)
        gradient: torch.Tensor | None = _GRAD.__get__(parameter)
        return gradient

    def write(parameter: nn.Parameter, value: Any = None) -> None:
        require_gradient(parameter)
        _GRAD.__set__(parameter, value)

    def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        fqn = vars(parameter)[_NAME]
        show_gradient(parameter)
        try:
            return copy.deepcopy(parameter, memo)
        finally:
            hide_gradient(parameter, fqn, is_released=False)

    members = {"grad": property(read, write, write), "__deepcopy__": deepcopy, _OWN_CLASS: own}
    return type(own.__name__, (own,), members)
