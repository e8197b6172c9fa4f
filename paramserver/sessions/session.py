"""One connected client: its session's record, and what the session may ask its stream to do.

Owns nothing. sessions.py decides when a session changes its state, grants.py which leases it has.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import Protocol

from paramserver.security.principals import Principal
from paramserver.sessions.leases import Lease
from paramserver.sessions.runs import Run
from paramserver.sessions.seats import Visitor
from paramserver.v1 import parameter_store_pb2 as pb
from storage.errors import ConflictError, NotFoundError, StorageError
from storage.reader import StepReader
from storage.slab import Slab
from storage.tiers.slots import Slot
from storage.versions import Job


class Stream(Protocol):
    """The stream of an attached session."""

    def post(self, subject: object, message: pb.SessionResponse) -> None:
        """Sends a message soon, without waiting; the newest of a subject counts."""

    def end(self, error: StorageError | None) -> None:
        """Ends the stream, with the error's status; None: in order."""


class SessionState(enum.Enum):
    """Where in its life a session is."""

    ATTACHED = enum.auto()
    """Its stream is open."""

    DETACHED = enum.auto()
    """Its stream broke; it has everything that it had until the grace time is over."""

    ENDED = enum.auto()
    """It has nothing."""


@dataclass(slots=True, eq=False)
class Session:
    """One connected client."""

    session_id: str
    client: str
    # Who opened it: only the same principal may use it.
    visitor: Visitor
    # The address that the session's present stream comes from.
    peer: str
    slot: Slot | None  # None: it may not map the arena
    stream: Stream
    heard_at: float  # on the loop's clock
    opened_at_unix_seconds: float = field(default_factory=time.time)
    state: SessionState = SessionState.ATTACHED
    timer: asyncio.TimerHandle | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    leases: dict[int, Lease] = field(default_factory=dict)
    # Of the leases, those that may be held once only: by the slab whose bytes they will become, or the group whose
    # gradient they take.
    exclusive: dict[Slab | str, Lease] = field(default_factory=dict)
    readers: dict[int, StepReader] = field(default_factory=dict)
    run: Run[Session] | None = None
    rank: int = -1

    @property
    def owner(self) -> Principal:
        """The principal that opened it, and that alone may use it."""
        return self.visitor.owner

    def heard(self) -> None:
        """It is alive."""
        self.heard_at = asyncio.get_running_loop().time()

    def require_run(self) -> Run[Session]:
        """Raises ConflictError before OpenJob."""
        if self.run is None:
            raise ConflictError("this session has not opened a job; call OpenJob first")
        return self.run

    async def job(self) -> Job:
        """The job of the session."""
        opening = self.require_run().job
        return opening.result() if opening.done() else await asyncio.shield(opening)

    def lease(self, lease_id: int) -> Lease:
        """Raises NotFoundError for a lease that the session does not hold."""
        if lease_id not in self.leases:
            raise NotFoundError(
                f"lease {lease_id} is not held by this session; it was returned, consumed or never granted"
            )
        return self.leases[lease_id]

    def take(self, lease: Lease) -> None:
        """Makes a lease the session's."""
        self.leases[lease.lease_id] = lease
        if (subject := lease.exclusive_subject) is not None:
            self.exclusive[subject] = lease

    def drop(self, lease: Lease) -> None:
        """Takes a lease away from the session."""
        del self.leases[lease.lease_id]
        subject = lease.exclusive_subject
        if subject is not None and self.exclusive.get(subject) is lease:
            del self.exclusive[subject]

    def reader(self, reader_id: int) -> StepReader:
        """Raises NotFoundError for a reader that the session does not have."""
        if reader_id not in self.readers:
            raise NotFoundError(f"reader {reader_id} is not open in this session; it was closed or never opened")
        return self.readers[reader_id]
