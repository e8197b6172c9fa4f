"""The contract of a tier: it hands out regions under a byte budget and moves bytes between them and host memory.

A tier knows nothing of shards, versions or jobs. All methods are called on the event loop's thread; a tier does its
blocking work elsewhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from storage.shard import TierName

PAGE_BYTES = 4096

RegionT = TypeVar("RegionT")


def round_up(nbytes: int, unit: int = PAGE_BYTES) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


@dataclass(slots=True)
class BusyClock:
    """The time in which at least one operation was under way."""

    seconds: float = 0.0
    _running: int = 0
    _since: float = 0.0

    def start(self) -> None:
        """One more operation is under way."""
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1

    def stop(self) -> None:
        """One of them is over."""
        self._running -= 1
        if self._running == 0:
            self.seconds += time.perf_counter() - self._since

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(slots=True)
class TierCounters:
    """Grows from the start of the daemon; read by metrics and the admin tool."""

    hits: int = 0
    misses: int = 0
    promotions: int = 0
    demotions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    reading: BusyClock = field(default_factory=BusyClock)
    writing: BusyClock = field(default_factory=BusyClock)
    fetching: BusyClock = field(default_factory=BusyClock)


class Tier(Protocol[RegionT]):
    """A place for bytes. `RegionT` is the tier's own handle of an allocated run of bytes."""

    @property
    def name(self) -> TierName: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def counters(self) -> TierCounters: ...
    @property
    def queue_depth(self) -> int: ...

    async def allocate(self, nbytes: int) -> RegionT:
        """Reserves `nbytes`; raises BudgetExceededError naming the budget where they can never fit."""
        ...

    def free(self, region: RegionT) -> None:
        """Gives a region back."""
        ...

    async def read_into(self, region: RegionT, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`, page-aligned host memory, from `region` at byte `offset`."""
        ...

    async def write_from(self, region: RegionT, offset: int, buffer: memoryview) -> None:
        """Writes `buffer`, page-aligned host memory, into `region` at byte `offset`."""
        ...

    async def close(self) -> None:
        """Waits for what is under way and lets go of files and memory."""
        ...
