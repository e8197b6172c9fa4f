"""Which gradients of this rank are not parked: the few that were used last.

The store has room for `GRADIENTS_AT_ONCE` gradients of each rank beside those that it can spill. This module owns the
order of their uses. It must never look at values.
"""

from __future__ import annotations

from typing import Protocol

from paramserver.contract.limits import GRADIENTS_AT_ONCE


class Parkable(Protocol):
    """A gradient that the store may keep elsewhere."""

    def park(self) -> None:
        """Have the store keep the gradient elsewhere, if it asks for that, until it is used again."""


class GradientWindow:
    """The gradients of one rank that were used since they were parked last, the least recently used one first."""

    def __init__(self) -> None:
        self._used: dict[Parkable, None] = {}

    def use(self, gradient: Parkable) -> None:
        """Take note that a gradient is used now, and park the one that was not used for longest if they are too many.

        Call this before the gradient's memory is asked for, because the store may have no room before another gradient
        is parked.
        """
        self._used.pop(gradient, None)
        while len(self._used) >= GRADIENTS_AT_ONCE:
            oldest = next(iter(self._used))
            del self._used[oldest]
            oldest.park()
        self._used[gradient] = None

    def has(self, gradient: Parkable) -> bool:
        """Return whether a gradient is one of those that were used last."""
        return gradient in self._used

    def remove(self, gradient: Parkable) -> None:
        """Take note that a gradient was parked, or is not needed any more. Idempotent."""
        self._used.pop(gradient, None)
