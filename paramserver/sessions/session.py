"""The record of one connected client's session.

This module owns nothing: sessions.py decides when a session changes its state, and grants.py which leases it has. It
must never call the engine.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from paramserver.security.principals import Principal
from paramserver.sessions.answers import Answers
from paramserver.sessions.client_process import ClientProcess
from paramserver.sessions.leases import DeviceLease, Lease
from paramserver.sessions.runs import Run
from paramserver.sessions.seats import Visitor
from paramserver.sessions.session_state import SessionState, SessionVerb, following
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import ConflictError, NotFoundError, StorageError
from storage.state.slab import Slab
from storage.state.versions import Job
from storage.steps.reader import StepReader
from storage.tiers.gpu import DeviceMemory
from storage.tiers.slots import ArenaSlot


class SessionStream(Protocol):
    """The stream of a session, by which the daemon sends notices to the client; service.py implements it."""

    def post(self, subject: object, message: pb.SessionResponse) -> None:
        """Send a message soon, without waiting. It replaces an unsent message about the same subject."""

    def end(self, error: StorageError | None) -> None:
        """End the stream with the error's status, or with OK if there is no error."""


@dataclass(slots=True, eq=False)
class Session:
    """The state of one client's session: its stream, its run, its leases and its readers."""

    session_id: str
    client: str
    # The client that opened the session, with its principal. No other principal may use the session.
    visitor: Visitor
    # The network address of the client at the other end of the session's present stream.
    peer: str
    # The session's slot in the header of the arena, which tells the client whether the session has ended; None if no
    # slot was free. A client without a slot must not map the arena.
    slot: ArenaSlot | None
    stream: SessionStream
    # Whether a device of the client copies from and to the arena on its own, so that it may write there even after the
    # client's process has ended.
    registers_arena: bool
    # The time of the client's last message, on the event loop's clock. The session ends if it is too long ago.
    heard_at: float
    opened_at_unix_seconds: float = field(default_factory=time.time)
    state: SessionState = SessionState.ATTACHED
    timer: asyncio.TimerHandle | None = None
    # The number that the client has given to the session's present stream; see Hello in parameter_store.proto.
    stream_number: int = 0
    answers: Answers = field(default_factory=Answers)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    leases: dict[int, Lease] = field(default_factory=dict)
    # The leases of which a session may hold only one for each slab, or for each group's gradient. Their keys are the
    # slab or the group's name (Lease.exclusive_subject).
    exclusive: dict[Slab | str, Lease] = field(default_factory=dict)
    readers: dict[int, StepReader] = field(default_factory=dict)
    run: Run[Session] | None = None
    rank: int = -1
    # The client's process, which the daemon watches if the client registers the arena and holds a write lease; None if
    # the process is not watched.
    process: ClientProcess | None = None
    # The directory of the device copies in the memory that the session offers of its device; None if it offers no
    # memory.
    device: DeviceMemory | None = None
    device_leases: dict[int, DeviceLease] = field(default_factory=dict)
    # Whether the daemon has seen that the client's process maps the arena. Such a process can read and write the whole
    # arena.
    maps_arena: bool = False
    # The capabilities that the client has named in its Hello and that this daemon knows; see contract/capabilities.py.
    capabilities: frozenset[str] = frozenset()
    # Whether the client has to park its gradients although host memory has room for all gradients of a step, because
    # the parking leaves room for activations.
    parks_gradients: bool = False

    @property
    def owner(self) -> Principal:
        """The principal that opened the session. No other principal may use it."""
        return self.visitor.owner

    def enter(self, verb: SessionVerb) -> None:
        """Enter the state that follows the present one by `verb`. Raise NotFoundError if no state does."""
        self.state = following(self.state, verb)

    def heard(self) -> None:
        """Note the time, because a message of the client has come now: the session does not end for its silence."""
        self.heard_at = asyncio.get_running_loop().time()

    def require_run(self) -> Run[Session]:
        """Return the run of which the session is a rank.

        Raises:
            ConflictError: the session has not opened a job.
        """
        if self.run is None:
            raise ConflictError("this session has not opened a job; call OpenJob first")
        return self.run

    async def job(self) -> Job:
        """Return the session's job, once it is open.

        Raises:
            ConflictError: the session has not opened a job.
            StorageError: the job could not be opened.
        """
        opening = self.require_run().job
        return opening.result() if opening.done() else await asyncio.shield(opening)

    def lease(self, lease_id: int) -> Lease:
        """Return a lease of the session.

        Raises:
            NotFoundError: the session does not hold a lease of that number.
        """
        if lease_id not in self.leases:
            raise NotFoundError(
                f"lease {lease_id} is not held by this session; it was returned, consumed or never granted"
            )
        return self.leases[lease_id]

    def add_lease(self, lease: Lease) -> None:
        """Add a lease to the session."""
        self.leases[lease.lease_id] = lease
        if (subject := lease.exclusive_subject) is not None:
            self.exclusive[subject] = lease

    def remove_lease(self, lease: Lease) -> None:
        """Remove a lease from the session."""
        del self.leases[lease.lease_id]
        subject = lease.exclusive_subject
        if subject is not None and self.exclusive.get(subject) is lease:
            del self.exclusive[subject]

    def reader(self, reader_id: int) -> StepReader:
        """Return a reader of the session.

        Raises:
            NotFoundError: the session has no reader of that number.
        """
        if reader_id not in self.readers:
            raise NotFoundError(f"reader {reader_id} is not open in this session; it was closed or never opened")
        return self.readers[reader_id]
