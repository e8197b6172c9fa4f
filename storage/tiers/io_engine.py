"""The contract of an I/O engine, which moves bytes between one data file and host memory.

`threaded_io.py` implements it with plain system calls; io_uring or GPUDirect Storage would be other modules beside it.
An I/O engine knows offsets in a file and buffers. It knows nothing of regions, shards or checksums: the caller passes
functions that verify or record checksums (`IoRequest.check`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Priority(enum.IntEnum):
    """The priority of a request. Requests with lower values are served first."""

    # The priority of reads and writes for which a client waits.
    DEMAND = 0
    # The priority of reads of bytes that a client will need soon. They wait behind those for which a client waits now.
    PREFETCH = 1
    # The priority of the reads and writes of an optimizer update.
    UPDATE = 2
    # The priority of the scrubber's reads, which verify bytes in the background and so come last.
    SCRUB = 3


@dataclass(slots=True, eq=False)
class IoRequest:
    """One request of a caller: read bytes of the file into a buffer, or write a buffer to the file.

    Attributes:
        offset: the byte of the file at which the move begins.
        buffer: whole, page-aligned pages of host memory.
        check: a function that is called on some thread of the I/O engine. After a read it raises DataLossError if the
            bytes are wrong; they are then read and checked once more, and only a second error is raised. Before a write
            it records the bytes' checksums. None if nothing is to be checked or recorded.
    """

    offset: int
    buffer: memoryview
    check: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IoLoad:
    """The counters of one I/O engine: requests and bytes at this moment, and sums since the start.

    Attributes:
        queued: the number of requests that wait or are under way.
        bytes_in_flight: the bytes of the moves at the device now.
        bytes_moved: the bytes of all moves that have ended.
        busy_seconds: the time in which the device read, plus the time in which it wrote.
        stalled_seconds: the age of the oldest move or sync at the device; 0 if there is none.
    """

    queued: int
    bytes_in_flight: int
    bytes_moved: int
    busy_seconds: float
    stalled_seconds: float


class IoEngine(Protocol):
    """An engine that moves bytes of one file. All methods are called on one event loop's thread."""

    async def read(self, requests: Sequence[IoRequest], priority: Priority) -> None:
        """Fill the buffers of all requests, in any order.

        If this raises, even because it was cancelled, no buffer is in use any more: requests that had not begun were
        dropped, and the others were waited for.

        Raises:
            DeviceError: the file system refused, or the file is too short.
            DataLossError: a check failed twice.
        """
        ...

    async def write(self, requests: Sequence[IoRequest], priority: Priority) -> None:
        """Write the buffers of all requests, in any order. They are durable only after `sync`.

        Errors and cancellation are as for `read`.
        """
        ...

    async def sync(self) -> None:
        """Wait until all writes that had returned before this call are on the device.

        Raises:
            DeviceError: the sync failed. Some writes may be lost, and a later sync does not prove the contrary; the
                caller must write the bytes again, in another place.
        """
        ...

    @property
    def load(self) -> IoLoad:
        """The engine's counters at this moment."""
        ...

    async def close(self) -> None:
        """Finish all requests, end the threads and close the file."""
        ...
