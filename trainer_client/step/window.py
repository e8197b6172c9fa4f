"""How far ahead the store is asked for units: as far as hides the time of a fetch behind the computation.

Owns the measurements. Must never know which units there are, nor read a clock: it is told.

[Note: depth of the window] A unit whose fetch takes as long as n units compute has to be asked for n uses ahead; one
more covers what varies. The store measures fetches (it alone knows what it had to read), this process the time between
two uses that was not waiting. Where a unit that was asked for is waited for nevertheless, because the device is slower
now or shared, the window grows by a unit for each such stall, and shrinks again when there was none for a while.
"""

from __future__ import annotations

import math

_MIN_UNITS = 2
_MAX_UNITS = 64
_MAX_EXTRA = 16
# Weight of a new measurement in a mean.
_WEIGHT = 0.125
# Gathers in a row without a stall after which the window may be smaller again.
_CALM_GATHERS = 64


class Window:
    """Attributes:
    units: how many units ahead of the current one to ask for.
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
        """Between two uses of units, without waits."""
        self._compute_seconds = _mean(self._compute_seconds, seconds)

    def note_fetches(self, total_bytes: int, total_seconds: float) -> None:
        """What the store has fetched for this job since it was started, and the sum of what each fetch took."""
        if total_bytes > self._bytes_seen:
            pace = (total_seconds - self._seconds_seen) / (total_bytes - self._bytes_seen)
            self._fetch_seconds_per_byte = _mean(self._fetch_seconds_per_byte, pace)
        self._bytes_seen, self._seconds_seen = total_bytes, total_seconds

    def note_gather(self, *, stalled: bool) -> None:
        """A unit that was asked for ahead was used, and had to be waited for (`stalled`) or not."""
        self._calm = 0 if stalled else self._calm + 1
        if stalled:
            self._extra = min(self._extra + 1, _MAX_EXTRA)
        elif self._calm >= _CALM_GATHERS:
            self._extra, self._calm = max(self._extra - 1, 0), 0

    def resize(self, unit_bytes: int) -> int:
        """Sets `units` for units of about that size, by what was measured so far; and returns it."""
        ahead = 1
        if self._compute_seconds and self._fetch_seconds_per_byte is not None:
            fetch_seconds = unit_bytes * self._fetch_seconds_per_byte
            ahead = math.ceil(min(fetch_seconds / self._compute_seconds, _MAX_UNITS))
        self.units = max(_MIN_UNITS, min(ahead + 1 + self._extra, _MAX_UNITS))
        return self.units


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
