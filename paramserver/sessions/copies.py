"""The copies of steps of other stores: which run copies which step, and which copies another run can continue.

This module owns the announcements of copies and their timers. It must never touch a job: runs.py does, and asks this
module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from storage.errors import BudgetExceededError

log = logging.getLogger(__name__)

# An unfinished copy whose client was lost is discarded after this time, because it takes the room of a whole step.
UNFINISHED_SECONDS = 3600
# The most copies that are announced or unfinished at a time.
MOST_COPIES = 1000


@dataclass(slots=True, eq=False)
class Copy:
    """An announced copy into a job.

    Attributes:
        run_id: the run that copies.
        origin: names the step that is copied.
        is_left: whether an unfinished step of this origin is there, and no run works on it.
        timer: ends the copy.
    """

    run_id: str
    origin: str
    is_left: bool
    timer: asyncio.TimerHandle


class Copies:
    """The newest copy into each job."""

    def __init__(self, on_expired: Callable[[str], Awaitable[None]]) -> None:
        """Make the table; `on_expired` is called with the job of an unfinished copy whose time is over."""
        self._on_expired = on_expired
        self._copies: dict[str, Copy] = {}
        self._ending: set[asyncio.Future[None]] = set()

    def begin(self, job: str, run_id: str, origin: str) -> bool:
        """Announce a copy, and return whether an unfinished one of the same origin is there.

        Raises:
            BudgetExceededError: MOST_COPIES other copies are announced.
        """
        former = self._copies.get(job)
        if former is None and len(self._copies) >= MOST_COPIES:
            raise BudgetExceededError(f"{MOST_COPIES} copies are under way here, and there can be no more; try later")
        is_left = former is not None and former.is_left and former.origin == origin
        if former is not None:
            former.timer.cancel()
        self._copies[job] = Copy(run_id, origin, is_left, self._timer(job))
        return is_left

    def find(self, job: str, run_id: str) -> Copy | None:
        """Return the copy that a run makes; None if the run was not announced as a copy."""
        copy = self._copies.get(job)
        return copy if copy is not None and copy.run_id == run_id else None

    def enter(self, job: str, run_id: str) -> bool:
        """Note that a run opens a job, and return whether it goes on with an unfinished copy.

        A run that is no copy ends the copy into its job, because it discards the unfinished step.
        """
        copy = self.find(job, run_id)
        if copy is None:
            if (former := self._copies.pop(job, None)) is not None:
                former.timer.cancel()
            return False
        goes_on, copy.is_left = copy.is_left, False
        return goes_on

    def end(self, job: str) -> None:
        """Note that the copy into a job is over: it has committed, or its client has closed its sessions."""
        self._copies.pop(job).timer.cancel()

    def leave(self, job: str) -> None:
        """Note that the client of a copy was lost, and that its unfinished step stays for a while."""
        copy = self._copies[job]
        copy.is_left = True
        copy.timer.cancel()
        copy.timer = self._timer(job)

    def _timer(self, job: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(UNFINISHED_SECONDS, self._expire, job)

    def _expire(self, job: str) -> None:
        copy = self._copies.pop(job)
        if copy.is_left:
            ending = asyncio.ensure_future(self._on_expired(job))
            self._ending.add(ending)
            ending.add_done_callback(self._on_ended)

    def _on_ended(self, ending: asyncio.Future[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("an unfinished copy could not be discarded: %s", error, exc_info=error)
