"""Functions that stand in for a method of one module, and not for that of a copy of the module.

This module owns what becomes of them in a copy. It must never know what they do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


class StandIn:
    """A function in the place of a method, as an attribute of the module. A copy of the module has the method itself.

    A plain function would be the same one in a copy, and act for the module that was copied.

    Args:
        method: the method, bound to the module.
        function: the function, which is called in its place.
    """

    def __init__(self, method: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._method = method
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the method, bound to the copy of the module that `copy.deepcopy` is making."""
        return copy.deepcopy(self._method, memo)
