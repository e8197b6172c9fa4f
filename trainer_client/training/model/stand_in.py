"""Functions that are in the place of a method of a module, or are its hooks, and do not act for a copy of the module.

This module owns what becomes of them when `copy.deepcopy` copies the module, and how they are known when the module is
pickled. It must never know what they do.

[Note: copies of a model] `copy.deepcopy` copies hooks and other attributes of modules. Of a function it takes the
function itself, which would go on to act for the module that was copied; of a method, what it is bound to as well. A
copy of an engine's model, as an average of its weights is kept in one, has nothing to do with the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

from torch import nn

# The attribute of hooks by which they are known. A function that wraps one (functools.wraps) has it, too.
_OWN = "_paramserver_hook"


class StandIn:
    """A function in the place of a method, as an attribute of the module. A copy of the module has the method itself.

    Attributes:
        method: the method, bound to the module.

    Args:
        method: see above.
        function: the function, which is called in its place.
    """

    def __init__(self, method: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.method = method
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def is_of_class(self) -> bool:
        """Whether the module's class has the method, so that a module without the stand-in has it, too."""
        owner, function = getattr(self.method, "__self__", None), getattr(self.method, "__func__", None)
        return function is not None and getattr(type(owner), function.__name__, None) is function

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the method, bound to the copy of the module that `copy.deepcopy` is making."""
        return copy.deepcopy(self.method, memo)


def only_for(modules: Container[nn.Module], hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does what `hook` does for these modules, and nothing for copies of them."""

    def call(module: nn.Module, *args: Any) -> Any:
        return hook(module, *args) if module in modules else None

    vars(call)[_OWN] = True
    return call


def is_own_hook(hook: object) -> bool:
    """Return whether a hook of a module was made by `only_for`. torch wraps some hooks in an object."""
    return bool(getattr(getattr(hook, "hook", hook), _OWN, False))
