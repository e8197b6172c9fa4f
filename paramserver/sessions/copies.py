"""The copies of steps from other stores into jobs of this one: which run copies which step, and which can be continued.

This module owns the announcements of copies and their timers. It must never touch a job: runs.py opens and discards
jobs, and asks this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paramserver.process.background import unforeseen
from storage.base.errors import BudgetExceededError

log = logging.getLogger(__name__)

# If the client that copies a step into this store is lost, the unfinished copy is discarded after this many seconds,
# because it takes the room of a whole step.
UNFINISHED_SECONDS = 3600
# The most jobs into which clients copy steps of other stores at the same time. A job counts from the announcement of
# the copy until the copy is finished.
MOST_COPIES = 1000
# One token can announce at most this many of the MOST_COPIES, so that clients with other tokens can announce some, too.
MOST_COPIES_OF_A_TOKEN = 250


@dataclass(slots=True, eq=False)
class AnnouncedCopy:
    """The announcement that a run copies a step of another store into a job of this one.

    Attributes:
        run_id: the run that copies.
        origin: names the step that is copied.
        left: names the unfinished step that an earlier run has left in the job, and on which no run works. None
            if the job has no such step.
        token: the name of the token with which the copy was announced; "" for an operator.
        timer: discards the announcement and the unfinished copy when their time is over. It is cancelled while a run
            has the job open.
    """

    run_id: str
    origin: str
    left: str | None
    token: str
    timer: asyncio.TimerHandle


class Copies:
    """The table of the copies that were announced, with at most one for each job, the newest."""

    def __init__(self, on_expired: Callable[[str], Awaitable[None]]) -> None:
        """Make the table; `on_expired` is called with the job of an unfinished copy whose time is over."""
        self._on_expired = on_expired
        self._copies: dict[str, AnnouncedCopy] = {}
        self._ending: set[asyncio.Future[None]] = set()

    def begin(self, job: str, run_id: str, origin: str, token: str = "") -> bool:
        """Announce a copy into a job, and return whether an unfinished copy of the same origin is in that job.

        Raises:
            BudgetExceededError: MOST_COPIES other copies are announced, or MOST_COPIES_OF_A_TOKEN with this token.
        """
        of_token = sum(copy.token == token for name, copy in self._copies.items() if name != job)
        if token and of_token >= MOST_COPIES_OF_A_TOKEN:
            raise BudgetExceededError(
                f"{MOST_COPIES_OF_A_TOKEN} copies were announced here with token {token}, which can have no more; end "
                "some, or try later"
            )
        former = self._copies.get(job)
        if former is None and len(self._copies) >= MOST_COPIES:
            raise BudgetExceededError(f"{MOST_COPIES} copies are under way here, and there can be no more; try later")
        left = None
        if former is not None:
            former.timer.cancel()
            left = former.left
        self._copies[job] = AnnouncedCopy(run_id, origin, left, token, self._timer(job))
        return left == origin

    def find(self, job: str, run_id: str) -> AnnouncedCopy | None:
        """Return the copy that a run makes; None if the run was not announced as a copy."""
        copy = self._copies.get(job)
        return copy if copy is not None and copy.run_id == run_id else None

    def enter(self, job: str, run_id: str) -> bool:
        """Note that a run is about to open a job, and return whether it goes on with an unfinished copy.

        Call `opened` or `refused` when the opening has ended.
        """
        copy = self._copies.get(job)
        if copy is None:
            return False
        copy.timer.cancel()
        return copy.run_id == run_id and copy.left == copy.origin

    def opened(self, job: str, run_id: str) -> None:
        """Note that a run has opened a job: the run works on the job's unfinished step, or has discarded it.

        If the run is not the announced one, the copy into its job is over.
        """
        if (copy := self.find(job, run_id)) is not None:
            copy.left = None
        elif job in self._copies:
            self.end(job)

    def refused(self, job: str) -> None:
        """Note that a run could not open a job: the unfinished step of a copy stays in it for the rest of its time."""
        if (copy := self._copies.get(job)) is not None:
            copy.timer.cancel()
            copy.timer = asyncio.get_running_loop().call_at(copy.timer.when(), self._expire, job)

    def end(self, job: str) -> None:
        """Note that the copy into a job is over: it has committed, was given up, or another run opened the job."""
        self._copies.pop(job).timer.cancel()

    def leave(self, job: str) -> None:
        """Note that the client of a copy was lost, and that its unfinished step stays for a while."""
        copy = self._copies[job]
        copy.left = copy.origin
        copy.timer.cancel()
        copy.timer = self._timer(job)

    def _timer(self, job: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(UNFINISHED_SECONDS, self._expire, job)

    def _expire(self, job: str) -> None:
        copy = self._copies.pop(job)
        if copy.left is not None:
            ending = asyncio.ensure_future(self._on_expired(job))
            self._ending.add(ending)
            ending.add_done_callback(self._on_ended)

    def _on_ended(self, ending: asyncio.Future[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("an unfinished copy could not be discarded: %s", error, exc_info=unforeseen(error))
