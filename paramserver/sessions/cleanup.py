"""The work after the end of a session: its leases are voided, their ranges freed, and its run is cleaned up.

The end of a session voids its leases. First the daemon changes a word in the session's slot of the arena, by which a
client that maps the arena sees that its leases are void; only then the daemon uses the ranges for something else.
Ranges that the client's process or its device may still write to go to the quarantine first.

This module owns the tasks that free ranges and clean up after runs in the background. It must never free a range that a
client's process may still write to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from paramserver.process.background import unforeseen
from paramserver.sessions.grants import Grants
from paramserver.sessions.leases import Lease
from paramserver.sessions.quarantine import Held, Quarantine
from paramserver.sessions.runs import Run, Runs
from paramserver.sessions.session import Session
from storage.base.slices import in_slices
from storage.state.slab import NEVER
from storage.tiers.arena import ArenaRange
from storage.tiers.slots import Slots

log = logging.getLogger(__name__)


class Cleanup:
    """The object that voids the leases of ended sessions, and frees in the background what their clients have left."""

    def __init__(self, slots: Slots, quarantine: Quarantine, grants: Grants, runs: Runs[Session]) -> None:
        """Make the clean-up of a daemon's sessions, which has nothing to do at first.

        Args:
            slots: the slots of the arena that the sessions have.
            quarantine: gets the ranges that a client's process or its device may still write to.
            grants: frees the ranges of the leases.
            runs: cleans up after the runs that the sessions leave.
        """
        self._slots = slots
        self._quarantine = quarantine
        self._grants = grants
        self._runs = runs
        self._tasks: set[asyncio.Task[None]] = set()

    def void_leases(self, session: Session, *, is_stopping: bool) -> list[Lease]:
        """Void all leases of a session, and mark the session's slot in the arena as ended.

        Return the leases that the caller gives to `begin`, which frees their ranges: all except those that the client's
        process or device may still write to. If the daemon `is_stopping`, return none, unless a commit of the session's
        run is under way.
        """
        leases = list(session.leases.values())
        session.leases.clear()
        session.exclusive.clear()
        for lease in leases:
            lease.void = True
        if is_stopping and (session.run is None or session.run.committing is None):
            # The daemon stops, so the ranges of the leases are not freed: ranges that are not freed are not
            # overwritten, and the client may read them until it has attached to the next daemon. If a commit is under
            # way, they are freed, because the commit may wait for leases, and write to their ranges.
            return []
        # The ranges in `written` are those to which the client may still write. A gradient that was handed over is none
        # of them: the client does not write to it, and its update frees it. A parked gradient is none either, because
        # the client has promised not to touch it.
        written = [lease for lease in leases if lease.is_written]
        held_back: list[ArenaRange] = []
        used: list[Lease] = []
        if session.slot is not None:
            self._slots.end(session.slot)
            device_may_write = session.registers_arena and not self._slots.has_left(session.slot)
            if device_may_write or self._slots.is_held(session.slot):
                used = [lease for lease in leases if lease.is_read_by_update]
                leases = [lease for lease in leases if not (lease.is_written or lease.is_read_by_update)]
                taken = map(self._grants.take_range, written)
                held_back = [range_ for range_ in taken if range_ is not None]
            held = Held(session.slot, held_back, session.registers_arena, session.process)
            self._quarantine.hold(held)
            session.process = None
            # Updates may still read the ranges of the gradients in `used`. So each range goes to the quarantine when
            # its update has ended. If the client comes back, it hands these gradients over again.
            for lease in used:
                assert lease.update is not None
                lease.update.add_done_callback(partial(self._hold_back, held, lease))
        if held_back:
            log.warning(
                "%d ranges that %s may still write to are held back until its process closes the arena or ends",
                len(held_back),
                session.client,
            )
        return leases

    def _hold_back(self, held: Held, lease: Lease, _: asyncio.Task[None]) -> None:
        """Put the range of a leased gradient, whose update has ended, with the other ranges of `held` into quarantine.

        The process of the ended session may still write to the range, so the daemon must not use it again yet.
        """
        if (range_ := self._grants.take_range(lease)) is not None:
            self._quarantine.hold_too(held, range_)

    def begin(self, leases: Sequence[Lease], run: Run[Session] | None) -> None:
        """Begin to free the ranges of void leases, and then to clean up after the run, if there is one.

        A task does this in the background, because no client waits for it. `until_done` waits until the task has ended.
        """
        cleaning_up = asyncio.ensure_future(self._clean_up(leases, run))
        self._tasks.add(cleaning_up)
        cleaning_up.add_done_callback(self._on_done)

    async def _clean_up(self, leases: Sequence[Lease], run: Run[Session] | None) -> None:
        """Free the ranges of void leases, then clean up after the run, if there is one.

        The event loop serves other calls in between, because a session may hold ten thousands of leases.
        """
        async for lease in in_slices(leases):
            self._grants.release_range(lease, NEVER)
        if run is not None:
            await self._runs.clean_up(run)

    def _on_done(self, cleaning_up: asyncio.Task[None]) -> None:
        self._tasks.discard(cleaning_up)
        if not cleaning_up.cancelled() and (error := cleaning_up.exception()) is not None:
            log.error("what a run left behind could not be cleaned up: %s", error, exc_info=unforeseen(error))

    async def until_done(self) -> None:
        """Wait until what was begun so far is done.

        A run waits until the leases of ended sessions are released, because it leases the same slabs.
        """
        if self._tasks:
            await asyncio.wait(list(self._tasks))
