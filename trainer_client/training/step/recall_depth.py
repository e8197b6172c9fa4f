"""How many boundaries of activation checkpoints stay on the device, and how many come back ahead of their use.

This module computes both from times that `activations` has measured. It must never look at a boundary.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer_client.base.recorder import Stopwatch
from trainer_client.training.step.window import Window

# The newest boundaries that stay on the device are at most so many, and so many are recalled ahead.
MOST_STAYING = 2
# The most boundaries that are on their way to the store at a time. With two of them, the link has always work.
MOST_LEAVING = 2
_MOST_AHEAD = 8
# After so many boundaries in a row whose recalls the store has not refused, one more is recalled ahead.
_CALM_BOUNDARIES = 64


class RecallDepth:
    """How many boundaries stay on the device, and how many are recalled ahead; see [Note: the life of a boundary].

    Both follow from the times that recalls take and that the parts of the model compute between two of them. Both are
    bounded, because boundaries take memory of the device.

    Args:
        stopwatch: begins to measure the computation between two boundaries.
    """

    def __init__(self, stopwatch: Callable[[], Stopwatch]) -> None:
        self._stopwatch = stopwatch
        self._window = Window()
        self._units = self._window.units
        self._most = _MOST_AHEAD
        self._calm = 0
        self._recalled_bytes = 0
        self._recall_seconds = 0.0
        self._computing: Stopwatch | None = None

    @property
    def staying(self) -> int:
        """The number of the newest boundaries that stay on the device."""
        return max(1, min(self._units - 1, MOST_STAYING))

    def note_recall(self, nbytes: int, seconds: float) -> None:
        """Record how long the store took to bring bytes back. Any thread may call this, one at a time."""
        self._recalled_bytes += nbytes
        self._recall_seconds += seconds

    def begin(self, *, stalled: bool) -> None:
        """Record that a boundary is needed now, and whether it has to be waited for."""
        if self._computing is not None:
            self._computing.stop(lambda began, ended: self._window.note_compute(ended - began))
            self._computing = None
        self._window.note_gather(stalled=stalled)
        self._calm += 1
        if self._calm >= _CALM_BOUNDARIES:
            self._most, self._calm = min(self._most + 1, _MOST_AHEAD), 0

    def resume(self) -> None:
        """Take note that a part of the model computes from now on."""
        self._computing = self._stopwatch()

    def pause(self) -> None:
        """Take note that the computation from now on is not that of backward."""
        self._computing = None

    def resize(self, nbytes: int) -> int:
        """Return how many boundaries of about this size to recall ahead."""
        self._window.note_fetches(self._recalled_bytes, self._recall_seconds)
        self._units = self._window.resize(nbytes)
        return min(self._units, self._most)

    def limit(self) -> None:
        """Recall fewer boundaries ahead for a while, because the store has no room for so many.

        The room may be that of another job, which gives it back when it ends.
        """
        self._most, self._calm = max(1, min(self._units, self._most) - 1), 0
