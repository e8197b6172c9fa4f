"""What the remote tier knows of one lender: its loan, how it is used, its measured speed, and what it has done.

This module owns nothing but these records. It must never call a lender.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from storage.tiers.base import BusyClock
from storage.tiers.lender import BorrowedMemory, Lender
from storage.tiers.loan_directory import LoanDirectory

# The speed of a device or lender is computed from the last RATE_BYTES that were read from it, and is unknown before
# LEAST_RATE_BYTES were read.
RATE_BYTES = 256 << 20
LEAST_RATE_BYTES = 8 << 20
# The most spans that are on their way to one lender and not acknowledged yet: enough for 1 GB/s at 8 ms.
MOST_SPANS_SENT = 8


class LenderState(enum.StrEnum):
    """Whether the remote tier has a loan of a lender, and whether it uses the loan."""

    AWAY = "away"
    """There is no loan: the lender cannot be reached, has refused, or has ended the loan."""

    TRIAL = "on trial"
    """The lender is used, but the speeds of reads from it and from NVMe are not both known yet."""

    IN_USE = "in use"
    """The lender is used, because reads from it are faster than from NVMe, or because it is always used."""

    SLOWER = "slower than nvme"
    """There is a loan, and it is not used, because reads from NVMe are faster."""


@dataclass(slots=True)
class Rate:
    """A moving average of bytes per second, computed from two counters that only grow: bytes and seconds."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _last_bytes: int = 0
    _last_seconds: float = 0.0

    def sample(self, total_bytes: int, total_seconds: float) -> None:
        """Update the average from the present values of the two counters. Call this from time to time."""
        self._bytes += total_bytes - self._last_bytes
        self._seconds += total_seconds - self._last_seconds
        self._last_bytes, self._last_seconds = total_bytes, total_seconds
        if self._bytes > RATE_BYTES:
            self._seconds *= RATE_BYTES / self._bytes
            self._bytes = RATE_BYTES

    def reset(self, total_bytes: int, total_seconds: float) -> None:
        """Forget the speed, and begin to measure a new one from the present values of the counters."""
        self._bytes = self._seconds = 0.0
        self._last_bytes, self._last_seconds = total_bytes, total_seconds

    @property
    def bytes_per_second(self) -> float | None:
        """The average speed; None until LEAST_RATE_BYTES were counted since the begin or the last `reset`."""
        return self._bytes / self._seconds if self._bytes >= LEAST_RATE_BYTES and self._seconds else None


@dataclass(slots=True, eq=False)
class Source:
    """One lender, and the loan that this store has there now, if there is one.

    Attributes:
        lender: the lender.
        state: how it is used.
        problem: why it is away; empty if it is not.
        told: the last problem that was logged, so that the remote tier logs each problem once.
        memory: the loan's memory; None while there is no loan.
        granted_bytes: the bytes that the lender lends. The store uses `directory.size_bytes` of them, as many as its
            budget allows.
        directory: which bytes lie where in the loan.
        ended: set to the reason when the loan has ended.
        room_to_send: bounds the number of spans that are on their way to the lender.
        rate: the speed of reads, computed from `bytes_read` and the seconds of `reading`.
        reading: runs while a read is under way.
        bytes_read: the bytes of all reads.
        asked_bytes: the bytes of reads under way.
        full_until: the time of the loop before which no new copy is placed, because the lender had no room.
        hits, misses, wrong_blocks, timeouts, losses: see `TierInfo.Lender` in the proto.
    """

    lender: Lender
    state: LenderState = LenderState.AWAY
    problem: str = "not connected yet"
    told: str = ""
    memory: BorrowedMemory | None = None
    granted_bytes: int = 0
    directory: LoanDirectory = field(default_factory=LoanDirectory)
    ended: asyncio.Future[str] | None = None
    room_to_send: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_SPANS_SENT))
    rate: Rate = field(default_factory=Rate)
    reading: BusyClock = field(default_factory=BusyClock)
    bytes_read: int = 0
    asked_bytes: int = 0
    full_until: float = 0.0
    hits: int = 0
    misses: int = 0
    wrong_blocks: int = 0
    timeouts: int = 0
    losses: int = 0

    def info(self, nvme_bytes_per_second: float) -> LenderInfo:
        """Return the lender's state, sizes, speed and counters for operators, with the measured speed of NVMe."""
        return LenderInfo(
            address=self.lender.address,
            state=self.state,
            problem=self.problem,
            size_bytes=self.directory.size_bytes,
            used_bytes=self.directory.used_bytes,
            hits=self.hits,
            misses=self.misses,
            wrong_blocks=self.wrong_blocks,
            timeouts=self.timeouts,
            losses=self.losses,
            bytes_per_second=self.rate.bytes_per_second or 0.0,
            nvme_bytes_per_second=nvme_bytes_per_second,
        )

    @property
    def is_used(self) -> bool:
        """Whether the remote tier reads from this lender and sends copies to it.

        It does so if it has a loan of this lender, unless reads from the lender are slower than reads from NVMe.
        """
        return self.memory is not None and self.state in (LenderState.TRIAL, LenderState.IN_USE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderInfo:
    """The state, sizes, speeds and counters of one lender, for operators; see `TierInfo.Lender` in the proto."""

    address: str
    state: LenderState
    problem: str
    size_bytes: int
    used_bytes: int
    hits: int
    misses: int
    wrong_blocks: int
    timeouts: int
    losses: int
    bytes_per_second: float
    nvme_bytes_per_second: float
