"""The contract of what moves bytes between one data file and host memory.

`threaded_io` fulfils it with plain system calls; io_uring or GPUDirect Storage would be other rooms beside it. An I/O
engine knows positions in a file and buffers, and nothing of regions, shards or checksums: those come as `check`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Priority(enum.IntEnum):
    """Who goes first, lowest value first."""

    DEMAND = 0
    PREFETCH = 1
    UPDATE = 2
    SCRUB = 3


@dataclass(slots=True, eq=False)
class IoRequest:
    """`buffer`, page-aligned whole pages of host memory, from or to byte `position` of the file.

    `check`, if any, is called where the transfer runs, on any thread: after a read, to raise if the bytes are wrong
    (the bytes are then read once more before the error counts), or before a write, to take note of them.
    """

    position: int
    buffer: memoryview
    check: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IoLoad:
    """What an engine is doing and has done. `stalled_seconds`: how long the oldest transfer has been at the device."""

    queued: int
    bytes_in_flight: int
    bytes_moved: int
    busy_seconds: float
    stalled_seconds: float


class IoEngine(Protocol):
    """Moves bytes of one file. Called on one event loop; requests complete each on its own, in any order."""

    async def read(self, requests: Sequence[IoRequest], priority: Priority) -> None:
        """Fills the buffers.

        Returns or raises, also when cancelled, only when no buffer is in use any more: what has not begun is dropped,
        what has is waited for.

        Raises:
            DeviceError: the file system refused.
            DataLossError: a check failed twice, or the file is too short.
        """
        ...

    async def write(self, requests: Sequence[IoRequest], priority: Priority) -> None:
        """Writes the buffers; durable only after `sync`. Otherwise as `read`."""
        ...

    async def sync(self) -> None:
        """Returns when all writes that had returned before are on the device.

        Raises:
            DeviceError: they may not be, and never will be because of a later sync: write them again, elsewhere.
        """
        ...

    @property
    def load(self) -> IoLoad:
        """What is under way now."""
        ...

    async def close(self) -> None:
        """Finishes all requests and lets go of threads and the file."""
        ...
