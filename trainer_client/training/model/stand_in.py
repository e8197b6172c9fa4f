"""Functions that replace a method of a module, or are its hooks, and that have no effect on a copy of the module.

This module owns what becomes of such a function when `copy.deepcopy` copies the module, and how it is recognised when
the module is pickled. It must never know what the functions do.

[Note: copies of a model] `copy.deepcopy` copies hooks and other attributes of modules. It does not copy a function, so
a hook of the copy would go on to act for the module that was copied. Of a bound method it copies the object to which
the method is bound, so an engine would be copied, too. But a copy of an engine's model, for example one that keeps an
average of the weights, must have nothing to do with the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

from torch import nn

# The name of the attribute that marks a function as a hook of this library, for `is_own_hook`. functools.wraps copies
# the attribute to a function that wraps a hook, so the wrapper is recognised, too.
_OWN = "_paramserver_hook"


class StandIn:
    """A function that replaces a method of a module, because it is an attribute of the module with the method's name.

    A copy of the module has the method again.

    Attributes:
        method: the replaced method, bound to the module.

    Args:
        method: see above.
        function: the function, which is called instead of the method.
    """

    def __init__(self, method: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.method = method
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def is_of_class(self) -> bool:
        """Whether the method is that of the module's class, so that a module without the stand-in has it, too."""
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
