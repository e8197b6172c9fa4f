"""The Session call: one stream per client, with the client's heartbeats one way and the store's notices the other.

This module owns the streams; sessions.py decides what a session is and when it ends. A stream costs the task of its
handler and what gRPC needs for it. This module must never poll anything for each session, because there may be many.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc.aio

from paramserver.contract.capabilities import CAPABILITIES
from paramserver.contract.tiers import tier_name
from paramserver.errors import UnavailableError, UnknownSessionError
from paramserver.events import EventKind, EventLog
from paramserver.process.background import repeat
from paramserver.rpc import convert
from paramserver.security.gate import Context, Gate, RefusedError, certificate_name, check_owner
from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.sessions.drain import Drain
from paramserver.sessions.notices import Notice, NoticeBoard
from paramserver.sessions.seats import Visitor
from paramserver.sessions.session import Session
from paramserver.sessions.session_state import SessionState
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import InvalidRequestError, NotFoundError, StorageError
from storage.base.waiting import LATE_SECONDS
from storage.engine import Engine

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
# When the daemon ends a session's stream, it waits at most this long for a client that does not read.
FLUSH_SECONDS = 1.0

_HEARTBEAT = pb.SessionResponse(heartbeat=pb.Heartbeat())
_SHUTDOWN = Notice(text="the store daemon is shutting down", event=pb.SessionResponse.EVENT_SHUTDOWN)


class SessionService:
    """The handler of the RPC Session, and the sender of notices about troubles of tiers to all clients."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        gate: Gate,
        quotas: Quotas,
        welcome: pb.SessionResponse.Welcome,
        events: EventLog,
        drain: Drain,
    ) -> None:
        """Start the task that looks for troubles of tiers and sends notices of them to all clients.

        Args:
            engine: the engine whose tiers the notices are about.
            sessions: the sessions, which begin and end with their streams.
            gate: checks the token again at each heartbeat.
            quotas: limit the sessions of a token.
            welcome: the fields that the welcome messages of all sessions have in common.
            events: gets the notices, too.
            drain: says whether new sessions are accepted.
        """
        self._sessions = sessions
        self._gate = gate
        self._quotas = quotas
        self._welcome = welcome
        self._events = events
        self._drain = drain
        self._board = NoticeBoard(engine)
        self._stopping = False
        self._looked_at = asyncio.get_running_loop().time()
        self._looking = asyncio.ensure_future(repeat("a look at the tiers", LOOK_SECONDS, self._look))

    async def serve(self, requests: AsyncIterator[pb.SessionRequest], owner: Principal, context: Context) -> None:
        """Serve one stream from the client's hello to its end.

        Args:
            requests: the client's messages.
            owner: the principal that calls.
            context: gRPC's context of the call.

        Raises:
            StorageError: the session was refused, or was ended by the daemon, or the client sent bytes that are no
                message.
            RefusedError: the session is another principal's, or the token is not valid any more.
        """
        seconds, loop = self._sessions.limits.heartbeat_timeout_seconds, asyncio.get_running_loop()
        due = loop.time() + seconds
        try:
            async with asyncio.timeout_at(due):
                hello = await anext(aiter(requests), None)
        except TimeoutError:
            if loop.time() - due > LATE_SECONDS:
                raise UnavailableError("the store daemon stood still meanwhile; connect again") from None
            raise InvalidRequestError(f"a session must begin with hello; nothing came for {seconds:g} s") from None
        if hello is None or hello.WhichOneof("message") != "hello":
            raise InvalidRequestError("the first message of a session must be hello")
        stream = _ServerStream(context)
        quota = self._quotas.of_token(owner).sessions
        visitor = Visitor(owner=owner, peer=context.peer(), certificate=certificate_name(context), quota=quota)
        session = self._attach(hello.hello, visitor, stream)
        try:
            stream.post("welcome", pb.SessionResponse(welcome=self._welcome_of(session)))
            for tier, notice in self._board.standing.items():
                stream.post(tier, pb.SessionResponse(notice=notice))
            await stream.listen(requests, partial(self._on_heartbeat, session, context))
        except RefusedError:
            if stream.is_current_of(session):
                self._sessions.end(session, "its token does not count any more")
            await stream.flush()
            raise
        except (asyncio.CancelledError, grpc.aio.BaseError):
            self._sessions.detach(session, stream)
            raise
        except Exception:
            # The client sent bytes that are no message, or the daemon failed. The session stays, so that the client can
            # resume it.
            self._sessions.detach(session, stream)
            await stream.flush()
            raise
        finally:
            stream.close()
        if stream.is_current_of(session):
            reason = "the daemon shuts down" if stream.ended else "closed by the client"
            self._sessions.end(session, reason, is_closed=not stream.ended)
        if stream.error is not None:
            raise stream.error

    def _on_heartbeat(self, session: Session, context: Context) -> None:
        # The token is checked again at each heartbeat, so that the sessions of an expired or withdrawn token end.
        check_owner(self._gate.principal(context), session.owner)
        session.heard()

    def _attach(self, hello: pb.SessionRequest.Hello, visitor: Visitor, stream: _ServerStream) -> Session:
        if self._stopping:
            raise UnavailableError("the store daemon is shutting down; connect again when it has been started anew")
        client = convert.name(hello.client, "hello.client")
        if not hello.session_id:
            self._drain.check_open()
            session = self._sessions.open(client, visitor, stream, registers_arena=hello.registers_arena)
            # A client of a later release may name capabilities that this daemon does not know, so those are left out.
            session.capabilities = frozenset(CAPABILITIES).intersection(hello.capabilities)
            return session
        try:
            session = self._sessions.get(hello.session_id)
        except NotFoundError as error:
            raise UnknownSessionError(str(error), self._welcome.epoch) from None
        check_owner(visitor.owner, session.owner)
        self._sessions.take_up(session, visitor, stream, hello.stream_number)
        return session

    def _welcome_of(self, session: Session) -> pb.SessionResponse.Welcome:
        welcome = pb.SessionResponse.Welcome()
        welcome.CopyFrom(self._welcome)
        welcome.session_id = session.session_id
        if session.slot is not None:
            welcome.arena.generation_offset = session.slot.offset
            welcome.arena.generation = session.slot.generation
        return welcome

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        late, self._looked_at = now - self._looked_at - LOOK_SECONDS, now
        if late > LATE_SECONDS:
            text = f"the daemon stood still for {late:.1f} s: its clients have as long again to be heard"
            log.warning("%s", text)
            self._events.add(EventKind.DAEMON, "daemon", text)
            self._sessions.stood_still(late)
        for notice in self._board.look():
            log.warning("%s", notice.text)
            kind = EventKind.BUDGET if notice.tier == pb.TIER_HOST else EventKind.TIER
            self._events.add(kind, tier_name(notice.tier), notice.text)
            self._announce(notice)

    def _announce(self, notice: Notice) -> None:
        for session in self._sessions:
            # No notice is sent to a detached session. Its client gets the notices that still apply when it resumes the
            # session.
            if session.state is SessionState.ATTACHED:
                session.stream.post(notice.tier, pb.SessionResponse(notice=notice))

    async def prepare_stop(self, timeout_seconds: float) -> None:
        """Refuse new sessions from now on, and wait at most `timeout_seconds` until no commit is under way.

        A commit may write to memory that its clients have mapped. So if the sessions end while no commit is under way,
        trainers can go on with what they have mapped until the next daemon serves.
        """
        self._stopping = True
        if not await self._sessions.until_no_vote(timeout_seconds):
            log.warning(
                "a commit is still under way after %g s: trainers that use the memory it writes to end with an error, "
                "and resume from the last commit",
                timeout_seconds,
            )

    def announce_stop(self) -> None:
        """Tell every client that the daemon stops, and end its session."""
        self._stopping = self._sessions.is_stopping = True
        self.close()
        self._announce(_SHUTDOWN)
        for session in self._sessions:
            session.stream.end(None)

    def close(self) -> None:
        """Stop looking for troubles of which clients get notices."""
        self._looking.cancel()


class _ServerStream:
    """The server's side of one Session call, which sends the session's messages to its client.

    It writes one message at a time, and keeps at most one message of each subject waiting. So a client that does not
    read costs only those messages, and delays no other client.
    """

    def __init__(self, context: Context) -> None:
        self.ended = False
        self.error: StorageError | None = None
        self._context = context
        self._waiting: dict[object, pb.SessionResponse] = {}
        self._writing: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[Any] | None = None

    def is_current_of(self, session: Session) -> bool:
        """Return whether this is the session's present stream, because no later one has taken the session up."""
        return session.stream is self

    def post(self, subject: object, message: pb.SessionResponse) -> None:
        """Send a message soon; see session.SessionStream."""
        self._waiting[subject] = message
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())

    def end(self, error: StorageError | None) -> None:
        """End the stream; see session.SessionStream."""
        if not self.ended:
            self.ended, self.error = True, error
            if self._listening is not None:
                self._listening.cancel()

    async def listen(self, requests: AsyncIterator[pb.SessionRequest], on_heartbeat: Callable[[], None]) -> None:
        """Answer heartbeats until the client closes the stream, or `end` is called.

        Raises:
            CancelledError, grpc.aio.BaseError: the stream broke.
            InvalidRequestError: the client sent bytes that are no message.
        """
        task = self._listening = asyncio.current_task()
        assert task is not None
        try:
            if not self.ended:
                async for _ in requests:
                    on_heartbeat()
                    self.post("heartbeat", _HEARTBEAT)
        except asyncio.CancelledError:
            if not self.ended:
                raise
            task.uncancel()
        finally:
            self._listening = None
        await self.flush()
        if not self.ended:
            # gRPC ends the client's messages in the same way if the client closes the session's stream and if the
            # stream breaks. This heartbeat tells the two apart, because it cannot be written to a broken stream.
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._context.write(_HEARTBEAT)

    def close(self) -> None:
        """Stop sending. Messages that still wait are dropped."""
        if self._writing is not None:
            self._writing.cancel()

    async def flush(self) -> None:
        """Wait, but not for long, until what was posted is written.

        If a write is cancelled half-way, gRPC sends the initial metadata again with the status. gRPC's core refuses
        that, so the client gets no status. So a write under way gets time to end before the stream does.
        """
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=FLUSH_SECONDS)

    async def _write(self) -> None:
        try:
            while self._waiting:
                subject = next(iter(self._waiting))
                await self._context.write(self._waiting.pop(subject))
        except grpc.aio.BaseError as error:
            # The session's stream is broken. The task in `listen` gets an error of its own and detaches the session, so
            # this task, which writes, only logs its error.
            log.debug("a session's stream takes no messages any more: %s", error)
        finally:
            self._writing = None
