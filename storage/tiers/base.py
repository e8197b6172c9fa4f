"""The size of a page, and the counters that every tier keeps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

PAGE_BYTES = 4096


def round_up(nbytes: int, unit: int = PAGE_BYTES) -> int:
    """Return the next multiple of `unit` that is not below `nbytes`."""
    return -(-nbytes // unit) * unit


@dataclass(slots=True)
class BusyClock:
    """A clock that runs while at least one operation of a tier is under way, to measure the tier's bandwidth."""

    seconds: float = 0.0
    _running: int = 0
    _since: float = 0.0

    def start(self) -> None:
        """Count one more operation that is under way. The first one starts the clock."""
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1

    def stop(self) -> None:
        """Count one operation as ended. The last one stops the clock."""
        self._running -= 1
        if self._running == 0:
            self.seconds += time.perf_counter() - self._since

    @property
    def elapsed(self) -> float:
        """The seconds, up to now, during which at least one operation was under way.

        Overlapping operations count once.
        """
        return self.seconds + (time.perf_counter() - self._since if self._running else 0.0)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier since the start of the daemon, for metrics and the admin tool."""

    hits: int = 0
    misses: int = 0
    promotions: int = 0
    demotions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    # The sum of all bytes that were allocated on the tier and all bytes that were freed.
    moved_bytes: int = 0
    reading: BusyClock = field(default_factory=BusyClock)
    writing: BusyClock = field(default_factory=BusyClock)
    fetching: BusyClock = field(default_factory=BusyClock)
