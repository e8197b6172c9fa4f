"""Ranges of the arena that belong to no slab: gradients, bytes staged for a later step, and ranges of tensors.

This module owns the record of which job is charged for each range, and the queue of requests that wait for room behind
all others. The caller that allocates a range frees it or hands it over: these ranges are never evicted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from storage.base.errors import BudgetExceededError
from storage.base.shown_sizes import shown_size
from storage.base.waiting import Alarm
from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _LastRequest:
    """A waiting request of `ScratchRanges.allocate_last`; `since` is its time of arrival on the loop's clock."""

    job: str
    label: str
    nbytes: int
    since: float
    granted: asyncio.Future[ArenaRange]


class ScratchRanges:
    """Allocates ranges of the arena that belong to no slab, and counts the bytes of each job's ranges."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._owners: dict[ArenaRange, str] = {}
        # The bytes of the ranges that each job is charged for, by the job's name.
        self._accounts: Counter[str] = Counter()
        # The waiting requests of `allocate_last`, oldest first. They get room only after all other requests for room.
        self._last: deque[_LastRequest] = deque()
        host.add_queue_behind(lambda: (request.since for request in self._last if not request.granted.done()))
        host.when_room_is_made(self._serve_last)

    @property
    def ranges(self) -> Collection[ArenaRange]:
        """All ranges that were allocated here, and not yet freed or handed over."""
        return self._owners.keys()

    @property
    def nbytes(self) -> int:
        """The bytes of all `ranges`."""
        return self._accounts.total()

    def nbytes_of(self, job: str) -> int:
        """Return the bytes of the ranges that are charged to a job."""
        return self._accounts[job]

    async def allocate(self, job: str, nbytes: int, *, from_top: bool = False) -> ArenaRange:
        """Wait for room, and return a range that is charged to `job`.

        Raises:
            BudgetExceededError: there was no room before the deadline.
        """
        return self._charge(job, await self._host.allocate(nbytes, from_top=from_top))

    @property
    def wanted_last_bytes(self) -> int:
        """The sum of the bytes that the waiting requests of `allocate_last` ask for."""
        return sum(request.nbytes for request in self._last)

    async def allocate_last(self, job: str, nbytes: int, label: str) -> ArenaRange:
        """Wait until no other request waits and there is room, and return a range that is charged to `job`.

        Activations are allocated like this. A client recalls them ahead of their use, and frees room only when it goes
        on, so the gradient or the unit that it needs to go on must not wait behind them.

        Args:
            job: the name of the job.
            nbytes: the bytes that are wanted.
            label: the name of the bytes that the range is for, for the text of the error.

        Raises:
            BudgetExceededError: there was no room before the deadline.
        """
        loop = asyncio.get_running_loop()
        request = _LastRequest(job=job, label=label, nbytes=nbytes, since=loop.time(), granted=loop.create_future())
        self._last.append(request)
        self._serve_last()
        if not request.granted.done():
            self._host.announce_shortage()
        deadline = Alarm(self._host.deadline(), partial(self._refuse, request))
        try:
            return await request.granted
        except asyncio.CancelledError:
            self.free_granted(request.granted)
            raise
        finally:
            deadline.cancel()
            if request in self._last:
                self._last.remove(request)
                self._serve_last()

    def _serve_last(self) -> None:
        """Grant the requests of `allocate_last` for which there is room, in their order."""
        while self._last:
            request = self._last[0]
            if request.granted.done():
                self._last.popleft()
                continue
            range_ = self._host.try_allocate(request.nbytes, None, from_top=True)
            if range_ is None:
                return
            self._last.popleft()
            request.granted.set_result(self._charge(request.job, range_))

    def _refuse(self, request: _LastRequest) -> None:
        """Make a request of `allocate_last` whose deadline has passed raise BudgetExceededError."""
        if not request.granted.done():
            request.granted.set_exception(
                BudgetExceededError(
                    f"host_budget {shown_size(self._host.budget_bytes)} had no room for {request.label} of "
                    f"{shown_size(request.nbytes)}: {shown_size(self._host.used_bytes)} are used; raise "
                    "host_budget, or move fewer activations"
                )
            )

    def allocate_free(self, nbytes: int) -> ArenaRange | None:
        """Return a range from the bottom of the free and the lent room, charged to no job; None if there is none.

        This neither waits nor evicts any copy.
        """
        range_ = self._host.allocate_free(nbytes, from_top=False, takes_back=True)
        return None if range_ is None else self._charge("", range_)

    def _charge(self, job: str, range_: ArenaRange) -> ArenaRange:
        self._owners[range_] = job
        self._accounts[job] += range_.nbytes
        return range_

    def free(self, range_: ArenaRange) -> None:
        """Free a range of `ranges`, and stop charging its job for it."""
        self._host.free(self.hand_over(range_))

    def free_granted(self, request: asyncio.Future[ArenaRange]) -> bool:
        """Free the range of a request whose caller was cancelled, if it was granted; return whether it was granted."""
        if not request.done() or request.cancelled() or request.exception() is not None:
            return False
        self.free(request.result())
        return True

    def hand_over(self, range_: ArenaRange) -> ArenaRange:
        """Stop charging a job for a range that is not freed, and return the range.

        The range then belongs to a slab, or the caller passes it to `HostTier.free` later.
        """
        job = self._owners.pop(range_)
        self._accounts[job] -= range_.nbytes
        if not self._accounts[job]:
            del self._accounts[job]
        return range_
