"""The host memory that this store lends to other daemons, as loans: byte ranges into which a borrower writes copies.

This module owns the loans and their ranges of the arena. It must never keep a range that the lender's own jobs need:
the host tier takes lent ranges back before it evicts any copy of its own. It must never show a borrower bytes that the
borrower did not write, so a range is zeroed when it becomes part of a loan.

A loan is a sparse address space. Its memory is taken in segments when the borrower first writes to them, and only from
free room. So a loan that is granted and not used takes no memory. If the borrower writes to a part of a segment that
was taken back, the segment gets memory again, and has only the pages that were written since.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from storage.base.errors import BudgetExceededError, InvalidRequestError
from storage.tiers.arena import ArenaRange
from storage.tiers.base import PAGE_BYTES
from storage.tiers.host import HostTier

# The unit in which the arena's memory becomes part of a loan, and in which it is taken back.
SEGMENT_BYTES = 1 << 20
# The most loans that a daemon gives at once. Each loan has a gRPC stream of its own, and takes a few hundred bytes.
MAX_LOANS = 256

_ZEROS = bytes(SEGMENT_BYTES)


@dataclass(slots=True)
class _Segment:
    """The arena memory of one loan segment. Bit N of `pages` is set if the borrower has written to page N of it."""

    range_: ArenaRange
    pages: int = 0


class Loan:
    """The memory that one borrower has, from its first request to the end of its stream.

    Attributes:
        borrower, identity, peer: the borrower's name for people, the identity to which the limit of one borrower
            applies, and the borrower's address.
        wanted_bytes: the bytes that the borrower has asked for.
        size_bytes: the borrower may keep bytes only in [0, size_bytes) of the loan.
        changed: set when `size_bytes` has changed, or when the lender ends the loan.
        is_ended: whether the loan has no memory any more, and gets none.
        bytes_read, bytes_written, taken_back_bytes: counters, for operators.
    """

    def __init__(self, memory: LentMemory, borrower: str, identity: str, peer: str, wanted_bytes: int) -> None:
        self.borrower = borrower
        self.identity = identity
        self.peer = peer
        self.wanted_bytes = wanted_bytes
        self.size_bytes = 0
        self.changed = asyncio.Event()
        self.is_ended = False
        self.bytes_read = 0
        self.bytes_written = 0
        self.taken_back_bytes = 0
        self._memory = memory
        self._segments: dict[int, _Segment] = {}

    @property
    def used_bytes(self) -> int:
        """The bytes of the arena that the segments of the loan take."""
        return len(self._segments) * SEGMENT_BYTES

    @property
    def ranges(self) -> Iterable[ArenaRange]:
        """The ranges of the arena that the segments of the loan take."""
        return (segment.range_ for segment in self._segments.values())

    def keep(self, first_byte: int, data: memoryview) -> bool:
        """Copy bytes into the loan, and return whether there was room. Without room nothing is changed.

        Raises:
            InvalidRequestError: the bytes leave the address space that the borrower has asked for.
        """
        self._check(first_byte, len(data))
        parts = list(_parts(first_byte, len(data)))
        # New segments of the loan are looked for only among the chunk's parts, which are at most two, because the loan
        # may have hundreds of thousands of segments.
        new = [part[0] for part in parts if part[0] not in self._segments]
        if first_byte + len(data) > self.size_bytes or not all(self._memory.provide(self, part[0]) for part in parts):
            self._memory.release([(self, segment) for segment in new if segment in self._segments])
            return False
        for segment, offset, start, end in parts:
            self._view(segment)[offset : offset + end - start] = data[start:end]
            self._segments[segment].pages |= _pages(offset, offset + end - start)
        self.bytes_written += len(data)
        return True

    def read(self, first_byte: int, nbytes: int) -> memoryview | bytes | None:
        """Return bytes of the loan, which the caller copies before its next `await`; None if they are not all there.

        Raises:
            InvalidRequestError: the bytes leave the address space that the borrower has asked for.
        """
        self._check(first_byte, nbytes)
        parts = list(_parts(first_byte, nbytes))
        if not all(self._has(segment, _pages(offset, offset + end - start)) for segment, offset, start, end in parts):
            return None
        self.bytes_read += nbytes
        views = [self._view(segment)[offset : offset + end - start] for segment, offset, start, end in parts]
        return views[0] if len(views) == 1 else b"".join(views)

    def discard(self, first_byte: int, nbytes: int) -> None:
        """Free the segments that lie within the given bytes, which the borrower needs no more."""
        first, end = -(-first_byte // SEGMENT_BYTES), (first_byte + nbytes) // SEGMENT_BYTES
        self._memory.release([(self, segment) for segment in self._segments if first <= segment < end])

    def end(self) -> None:
        """Free the memory of the loan, and forget it. A repeated call has no effect."""
        self._memory.end(self)

    def _has(self, segment: int, pages: int) -> bool:
        return segment in self._segments and not pages & ~self._segments[segment].pages

    def _view(self, segment: int) -> memoryview:
        return self._memory.host.view(self._segments[segment].range_)

    def _check(self, first_byte: int, nbytes: int) -> None:
        if not 0 < nbytes <= SEGMENT_BYTES or first_byte + nbytes > self.wanted_bytes:
            raise InvalidRequestError(
                f"bytes [{first_byte}, {first_byte + nbytes}) of a loan of {self.wanted_bytes} bytes: allowed are 1 to "
                f"{SEGMENT_BYTES} bytes within it"
            )


class LentSegments:
    """The segments of all loans of a store that have memory, in the order in which it was taken from the arena.

    The host tier takes memory back through this class when the store's own jobs need it.
    """

    def __init__(self) -> None:
        self.taken: dict[tuple[Loan, int], None] = {}

    def take_back(self) -> ArenaRange | None:
        """Take the newest segment from its loan, and return its range, which the caller frees; None if there is none.

        Segments are taken from the top of the arena downwards, so the newest one lies next to the free room below.
        """
        if not self.taken:
            return None
        (loan, segment), _ = self.taken.popitem()
        loan.taken_back_bytes += SEGMENT_BYTES
        return loan._segments.pop(segment).range_


class LentMemory:
    """Grants loans to other daemons, gives them free memory of the arena within one budget, and ends them."""

    def __init__(
        self, host: HostTier, segments: LentSegments, budget_bytes: int = 0, per_borrower_bytes: int | None = None
    ) -> None:
        """Lend up to `budget_bytes` of the free room of `host`.

        Args:
            host: the host tier, which takes the segments back that it needs.
            segments: the segments of the loans.
            budget_bytes: the most bytes of all loans.
            per_borrower_bytes: the most bytes of all loans of one identity together; None if only the budget limits
                them.
        """
        self.host = host
        self.budget_bytes = budget_bytes
        self._per_borrower_bytes = per_borrower_bytes
        self._loans: list[Loan] = []
        self._taken = segments.taken

    @property
    def loans(self) -> Sequence[Loan]:
        """The loans that have not ended, oldest first."""
        return tuple(self._loans)

    @property
    def used_bytes(self) -> int:
        """The bytes of the arena that all loans have."""
        return len(self._taken) * SEGMENT_BYTES

    @property
    def ranges(self) -> Iterator[ArenaRange]:
        """The ranges of the arena that all loans have."""
        return (range_ for loan in self._loans for range_ in loan.ranges)

    def open(self, borrower: str, identity: str, peer: str, wanted_bytes: int) -> Loan:
        """Return a new loan, of as many bytes as the budget and the limit of one borrower allow.

        Raises:
            BudgetExceededError: nothing may be lent, or there are too many loans.
        """
        if not self.budget_bytes:
            raise BudgetExceededError("this daemon lends no memory: its lend_budget is 0; set lend_budget there")
        if len(self._loans) >= MAX_LOANS:
            raise BudgetExceededError(f"this daemon has {MAX_LOANS} loans, the most that it gives at once")
        loan = Loan(self, borrower, identity, peer, wanted_bytes)
        self._loans.append(loan)
        self._set_sizes()
        return loan

    def resize(self, budget_bytes: int, per_borrower_bytes: int | None) -> None:
        """Lend within other limits from now on. What exceeds them is taken back at once."""
        self.budget_bytes, self._per_borrower_bytes = budget_bytes, per_borrower_bytes
        self._set_sizes()
        used_bytes, used_by = 0, Counter[str]()
        excess = []
        # The lender takes back the loan segments that exceed the new limits, the newest ones first. The walk is in the
        # order in which the segments got memory, so the oldest ones stay.
        for loan, segment in self._taken:
            if (
                (segment + 1) * SEGMENT_BYTES > loan.size_bytes
                or used_by[loan.identity] + SEGMENT_BYTES > self._borrower_limit_bytes
                or used_bytes + SEGMENT_BYTES > budget_bytes
            ):
                loan.taken_back_bytes += SEGMENT_BYTES
                excess.append((loan, segment))
            else:
                used_bytes += SEGMENT_BYTES
                used_by[loan.identity] += SEGMENT_BYTES
        self.release(excess)

    def provide(self, loan: Loan, segment: int) -> bool:
        """Give a segment of a loan memory, if it has none yet and free memory and the limits allow it.

        Returns:
            Whether the segment has memory now.
        """
        if segment in loan._segments:
            return True
        of_borrower = sum(other.used_bytes for other in self._loans if other.identity == loan.identity)
        if (
            loan.is_ended
            or of_borrower + SEGMENT_BYTES > self._borrower_limit_bytes
            or self.used_bytes + SEGMENT_BYTES > self.budget_bytes
        ):
            return False
        range_ = self.host.allocate_free(SEGMENT_BYTES)
        if range_ is None:
            return False
        self.host.view(range_)[:] = _ZEROS
        loan._segments[segment] = _Segment(range_)
        self._taken[loan, segment] = None
        return True

    def release(self, segments: Iterable[tuple[Loan, int]]) -> None:
        """Free the memory of segments of loans.

        All segments leave their loans before the first one is freed, because a waiting request that gets the room may
        take back further segments.
        """
        freed = []
        for loan, segment in segments:
            del self._taken[loan, segment]
            freed.append(loan._segments.pop(segment).range_)
        self.host.free_all(freed)

    def end(self, loan: Loan) -> None:
        """Free the memory of a loan, and forget it. A repeated call has no effect."""
        if loan.is_ended:
            return
        loan.is_ended = True
        loan.size_bytes = 0
        self._loans.remove(loan)
        self.release([(loan, segment) for segment in loan._segments])
        loan.changed.set()

    def close(self) -> None:
        """End all loans, because the store closes."""
        for loan in self.loans:
            self.end(loan)

    @property
    def _borrower_limit_bytes(self) -> int:
        """The most bytes that all loans of one identity may take together."""
        return self.budget_bytes if self._per_borrower_bytes is None else self._per_borrower_bytes

    def _set_sizes(self) -> None:
        """Set the size of each loan, in whole segments, to what the present limits allow."""
        for loan in self._loans:
            size = min(loan.wanted_bytes, self._borrower_limit_bytes, self.budget_bytes)
            size -= size % SEGMENT_BYTES
            if size != loan.size_bytes:
                loan.size_bytes = size
                loan.changed.set()


def _pages(start: int, end: int) -> int:
    """Return a mask of a segment's pages: the bits of the pages with bytes `[start, end)` of the segment are set."""
    first, last = start // PAGE_BYTES, -(-end // PAGE_BYTES)
    return (1 << last) - (1 << first)


def _parts(first_byte: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut bytes at the borders of segments; yield for each part its segment, its offset there, its start and its end.

    Start and end count from `first_byte`.
    """
    done = 0
    while done < nbytes:
        segment, offset = divmod(first_byte + done, SEGMENT_BYTES)
        length = min(SEGMENT_BYTES - offset, nbytes - done)
        yield segment, offset, done, done + length
        done += length
