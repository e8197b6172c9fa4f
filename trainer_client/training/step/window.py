"""How far ahead the store is asked for units: far enough to hide the time of a fetch behind the computation.

This module owns the measurements. It must never know which units there are, nor read a clock: Residency and RecallDepth
measure.

[Note: depth of the window] If the fetch of a unit takes as long as n units compute, the unit has to be asked for n uses
ahead. It is asked for one more use ahead, because the times vary. The store measures the fetches, because only the
store knows what it had to read. The trainer measures the time between two uses, without waits. If a unit that was asked
for is waited for nevertheless, because the device is slower now or shared, the window grows by one unit for each such
stall, and shrinks again when there was none for a while.
"""

from __future__ import annotations

import math

_MIN_UNITS = 2
_MAX_UNITS = 64
_MAX_EXTRA = 16
# The weight of a new measurement in the running means of fetch and compute times.
_WEIGHT = 0.125
# The window shrinks by one unit after this many gathers in a row without a stall.
_CALM_GATHERS = 64


class Window:
    """Computes how many units the store should fetch ahead, from the times of fetches, computation and stalls.

    For RecallDepth, a boundary of an activation checkpoint takes the place of a unit.

    Attributes:
        units: the number of units, from the current one on, that the store should fetch ahead.
    """

    def __init__(self) -> None:
        self.units = _MIN_UNITS
        self._compute_seconds: float | None = None
        self._fetch_seconds_per_byte: float | None = None
        self._bytes_seen = 0
        self._seconds_seen = 0.0
        self._extra = 0
        self._calm = 0

    def note_compute(self, seconds: float) -> None:
        """Record how long the trainer computed between the uses of two units, without the time that it waited."""
        self._compute_seconds = _mean(self._compute_seconds, seconds)

    def note_fetches(self, total_bytes: int, total_seconds: float) -> None:
        """Record the bytes that the store has fetched for this job since its start, and the sum of the fetches' times.

        The pace of the fetches follows from the differences to the last call.
        """
        if total_bytes > self._bytes_seen:
            pace = (total_seconds - self._seconds_seen) / (total_bytes - self._bytes_seen)
            self._fetch_seconds_per_byte = _mean(self._fetch_seconds_per_byte, pace)
        self._bytes_seen, self._seconds_seen = total_bytes, total_seconds

    def note_gather(self, *, stalled: bool) -> None:
        """Record the use of a unit that was asked for ahead, and whether the trainer had to wait for it (`stalled`)."""
        self._calm = 0 if stalled else self._calm + 1
        if stalled:
            self._extra = min(self._extra + 1, _MAX_EXTRA)
        elif self._calm >= _CALM_GATHERS:
            self._extra, self._calm = max(self._extra - 1, 0), 0

    def resize(self, unit_bytes: int) -> int:
        """Set `units` from the times that were measured so far, for units of about this size, and return it."""
        ahead = 1
        if self._compute_seconds and self._fetch_seconds_per_byte is not None:
            fetch_seconds = unit_bytes * self._fetch_seconds_per_byte
            ahead = math.ceil(min(fetch_seconds / self._compute_seconds, _MAX_UNITS))
        self.units = max(_MIN_UNITS, min(ahead + 1 + self._extra, _MAX_UNITS))
        return self.units


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
