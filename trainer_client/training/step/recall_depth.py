"""How many boundaries of activation checkpoints stay on the device, and how many come back ahead of their use.

This module computes both from times that `boundary_recalls` has measured. It must never look at a boundary.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer_client.base.recorder import Stopwatch
from trainer_client.training.step.window import Window

# The most boundaries that stay on the device and are not sent to the store. They are the newest ones, because backward
# needs these first.
MOST_STAYING = 2
# The most boundaries whose copies from the device to the store are unfinished at a time. With two of them, the link to
# the store is never idle.
MOST_LEAVING = 2
# The most boundaries that are recalled from the store before backward needs them.
_MOST_AHEAD = 8
# After this many boundaries in a row whose recalls the store has not refused, one more boundary is recalled ahead.
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
        """How many of the newest boundaries stay on the device, because they could not come back in time."""
        return max(1, min(self._units - 1, MOST_STAYING))

    def note_recall(self, nbytes: int, seconds: float) -> None:
        """Record how long the store took to bring bytes back. Any thread may call this, one at a time."""
        self._recalled_bytes += nbytes
        self._recall_seconds += seconds

    def begin(self, *, stalled: bool) -> None:
        """Record that backward needs a boundary now, and whether it has to wait for the boundary (`stalled`)."""
        if self._computing is not None:
            self._computing.stop(lambda began, ended: self._window.note_compute(ended - began))
            self._computing = None
        self._window.note_gather(stalled=stalled)
        self._calm += 1
        if self._calm >= _CALM_BOUNDARIES:
            self._most, self._calm = min(self._most + 1, _MOST_AHEAD), 0

    def resume(self) -> None:
        """Begin to measure the computation of a part of the model, which ends when the next boundary is needed."""
        self._computing = self._stopwatch()

    def pause(self) -> None:
        """Stop the measurement, because a forward begins, whose time must not count as that of a part's backward."""
        self._computing = None

    def resize(self, nbytes: int) -> int:
        """Return how many boundaries of about `nbytes` bytes the caller should recall ahead of their use."""
        self._window.note_fetches(self._recalled_bytes, self._recall_seconds)
        self._units = self._window.resize(nbytes)
        return min(self._units, self._most)

    def limit(self) -> None:
        """Recall fewer boundaries ahead for a while, because the store has no room for so many.

        Another job may have the room and give it back when it ends, so the number grows again after a while.
        """
        self._most, self._calm = max(1, min(self._units, self._most) - 1), 0
