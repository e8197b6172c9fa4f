"""The session with the daemon: one bidirectional stream whose heartbeats show that this process is alive.

This module owns the stream and the thread that reads it. If the stream breaks, the thread resumes the session with a
new stream, within the grace time that the daemon allows. The training loop must never drive the stream, because
heartbeats have to go on while a step computes. This module uses grpc's synchronous API, because a trainer may run an
event loop of its own.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from paramserver.contract.answered import epoch_of
from paramserver.contract.capabilities import CAPABILITIES
from paramserver.contract.printable import printable
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.errors import DaemonRestartedError, StoreError, StoreTimeoutError, StoreUnavailableError
from trainer_client.log_context import carried
from trainer_client.transport.arena import session_ended
from trainer_client.transport.backoff import Backoff
from trainer_client.transport.channel import CONTROL_DEADLINE_SECONDS, translate
from trainer_client.transport.own_process import OwnProcess

log = logging.getLogger(__name__)

# The shortest and the longest pause between two attempts to resume the session; see backoff.py.
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
# The client goes on trying for this long after the grace time, because the daemon may notice the break later than the
# client, so that the daemon's grace time ends later.
_SLACK_SECONDS = 1.0
# Status codes of a stream that no daemon answered; a stream that is cancelled after a time-out is among them.
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

# The events of which a client need not be warned.
_ORDINARY = (
    pb.SessionResponse.EVENT_TIER_RECOVERED,
    pb.SessionResponse.EVENT_BUDGET_RELIEVED,
    pb.SessionResponse.EVENT_RANK_CLOSED,
)

# A function that gets the text about another rank of this session's run that has gone, and whether it has closed its
# session by itself.
OnRankGone = Callable[[str, bool], None]


class SessionState(enum.Enum):
    """The states of a session."""

    OPENING = enum.auto()
    """The daemon has not sent its Welcome yet."""

    ATTACHED = enum.auto()
    """Calls can be made."""

    BROKEN = enum.auto()
    """The stream broke, and the session's thread tries to resume it. Leases are valid, but calls would fail."""

    LOST = enum.auto()
    """The session has ended, and all its leases are void."""


class Session:
    """A session, which the constructor opens.

    Attributes:
        process: the process that has the session.
        left_at: the time at which the session was last left in state ATTACHED, in seconds of time.monotonic().
        is_pressed: whether the daemon has said last that requests wait for room in host memory.

    Args:
        stub: makes the calls.
        client: name of this client, shown to people who operate the daemon.
        registers_arena: whether this process may register the arena with a device while the session lasts.
        on_lost: called once, on the session's thread, if the session ends otherwise than by `close`.
        on_rank_gone: called on the session's thread when another rank of the run has gone.
        timeout_seconds: how long the daemon may take to welcome the session.

    Raises:
        StoreError: the daemon refuses the session or does not answer in time.
    """

    def __init__(
        self,
        stub: pb_grpc.ParameterStoreStub,
        client: str,
        *,
        registers_arena: bool,
        on_lost: Callable[[StoreError], None] = lambda _: None,
        on_rank_gone: OnRankGone = lambda _who, _is_closed: None,
        timeout_seconds: float = CONTROL_DEADLINE_SECONDS,
    ) -> None:
        self._stub = stub
        self._client = client
        self._on_lost = on_lost
        self._on_rank_gone = on_rank_gone
        self.process = OwnProcess()
        self._changed = threading.Condition()
        self._state = SessionState.OPENING
        self._failure: StoreError | None = None
        self.left_at = 0.0
        self.is_pressed = False
        self._closing = threading.Event()
        self._welcome = pb.SessionResponse.Welcome()
        hello = pb.SessionRequest.Hello(client=client, registers_arena=registers_arena, capabilities=CAPABILITIES)
        self._stream = _Stream(stub, hello)
        self._thread = threading.Thread(target=carried(self._run), name="paramserver-session", daemon=True)
        self._thread.start()
        with self._changed:
            welcomed = self._changed.wait_for(lambda: self._state is not SessionState.OPENING, timeout_seconds)
        if not welcomed:
            # A session that the daemon has opened without an answer ends there after the grace time.
            self.break_off()
            raise StoreTimeoutError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the daemon did not welcome the session within {timeout_seconds:.3g} s",
            )
        self.check()

    @property
    def welcome(self) -> pb.SessionResponse.Welcome:
        """The daemon's Welcome message, with its limits and the session's id."""
        return self._welcome

    @property
    def failure(self) -> StoreError | None:
        """The error that ended the session; None while the session has not ended."""
        return self._failure

    def check(self) -> None:
        """Raise the StoreError that ended the session, if it has ended; all its leases are void then."""
        self.process.check()
        if self._failure is not None:
            raise type(self._failure)(self._failure.code, self._failure.message)

    def wait_until_attached(self, timeout_seconds: float | None = None) -> None:
        """Wait while the session's thread tries to resume a broken stream, so that the caller's next call can succeed.

        Without `timeout_seconds` that lasts at most a little longer than the daemon's grace time.

        Raises:
            StoreTimeoutError: `timeout_seconds` are over, and the session may still be resumed.
            StoreError: the session has ended.
        """
        self.process.check()
        if self._state is SessionState.BROKEN:
            with self._changed:
                decided = self._changed.wait_for(
                    lambda: self._state is not SessionState.BROKEN or self._closing.is_set(), timeout_seconds
                )
            if not decided:
                raise StoreTimeoutError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    "the connection to the store broke and did not come back in time",
                )
        self.check()

    def ends_within(self, seconds: float) -> bool:
        """Return whether the session has ended, after waiting for up to `seconds` for its stream to break.

        The wait is needed because a call may fail before the session's stream does. If the stream has broken, wait on
        until the session is resumed or has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state is not SessionState.ATTACHED or self._closing.is_set(), seconds)
            self._changed.wait_for(lambda: self._state is not SessionState.BROKEN or self._closing.is_set())
            return self._state is SessionState.LOST

    def close(self) -> None:
        """End the session; idempotent."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._stream.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        self._stream.cancel()

    def break_off(self) -> None:
        """Leave the session as if the connection were lost, so that the daemon keeps it for its grace time."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._stream.cancel()
        self._stream.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:
            if self._state is SessionState.LOST:
                raise
            if self._closing.is_set():
                return
            log.exception("the session with the store cannot be kept")
            # Callers would wait without end for this thread to resume the session.
            self._lose(
                StoreUnavailableError(
                    grpc.StatusCode.UNKNOWN,
                    f"this process cannot keep its session with the store ({error}): restart the job; it resumes from "
                    "the last commit",
                )
            )

    def _keep(self) -> None:
        while (error := self._listen()) is not None:
            if error.code is not grpc.StatusCode.UNAVAILABLE or self._state is not SessionState.ATTACHED:
                self._lose(error)
                return
            self._enter(SessionState.BROKEN)
            log.warning("the session's stream broke (%s); resuming the session", error.message)
            try:
                self._take_up(error)
            except StoreError as final:
                self._lose(final)
                return

    def _listen(self) -> StoreError | None:
        """Read the stream to its end. Return the error that ended it, or None if `close` did."""
        error: StoreError | None = None
        try:
            for response in self._stream.call:
                self._on_response(response)
            error = _ended_by_the_daemon()
        except grpc.RpcError as failure:
            error = _translate_end(failure)
        finally:
            self._stream.close()
        return None if self._closing.is_set() else error

    def _on_response(self, response: pb.SessionResponse) -> None:
        match response.WhichOneof("message"):
            case "welcome":
                self._stream.interval_seconds = response.welcome.heartbeat_interval_millis / 1000
                self._welcome = response.welcome
                self._enter(SessionState.ATTACHED)
            case "notice":
                self._on_notice(response.notice.event, printable(response.notice.text))

    def _on_notice(self, event: pb.SessionResponse.Event, text: str) -> None:
        log.log(logging.INFO if event in _ORDINARY else logging.WARNING, "store daemon: %s", text)
        if event in (pb.SessionResponse.EVENT_BUDGET_PRESSURE, pb.SessionResponse.EVENT_BUDGET_RELIEVED):
            self.is_pressed = event == pb.SessionResponse.EVENT_BUDGET_PRESSURE
        if event in (pb.SessionResponse.EVENT_RANK_GONE, pb.SessionResponse.EVENT_RANK_CLOSED):
            self._on_rank_gone(text, event == pb.SessionResponse.EVENT_RANK_CLOSED)

    def _take_up(self, cause: StoreError) -> None:
        """Open streams until the daemon resumes the session on one of them, or `close` is called.

        Raises:
            StoreError: the session has ended.
        """
        grace = self._welcome.grace_millis / 1000
        deadline = time.monotonic() + grace + _SLACK_SECONDS
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while not self._closing.wait(backoff.next_seconds()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise cause
            hello = pb.SessionRequest.Hello(client=self._client, session_id=self._welcome.session_id)
            self._stream = _Stream(self._stub, hello)
            try:
                self._on_response(self._stream.first_response(remaining))
            except StoreError as error:
                self._stream.close()
                if error.code in _NO_ANSWER:
                    continue
                # The daemon's answer has its epoch if the daemon does not know the session.
                epoch = epoch_of(self._stream.call.trailing_metadata())
                if epoch is None or epoch == self._welcome.epoch:
                    raise
                raise _restarted() from None
            else:
                log.warning("the session is resumed")
                return

    def _enter(self, state: SessionState) -> None:
        with self._changed:
            if self._state is SessionState.ATTACHED:
                self.left_at = time.monotonic()
            self._state = state
            self._changed.notify_all()

    def _lose(self, error: StoreError) -> None:
        self._failure = error
        self._enter(SessionState.LOST)
        self._on_lost(error)


class _Stream:
    """One call of the RPC `Session`; a session has a new one each time it is resumed."""

    def __init__(self, stub: pb_grpc.ParameterStoreStub, hello: pb.SessionRequest.Hello) -> None:
        self.interval_seconds = 1.0
        self._closing = threading.Event()
        self.call: Any = stub.Session(self._requests(hello))

    def first_response(self, timeout_seconds: float) -> pb.SessionResponse:
        """Wait for the first response and return it.

        It can raise StoreError, with code CANCELLED after the time-out.
        """
        alarm = threading.Timer(timeout_seconds, self.call.cancel)
        alarm.start()
        try:
            response: pb.SessionResponse | None = next(self.call, None)
        except grpc.RpcError as failure:
            raise _translate_end(failure) from None
        finally:
            alarm.cancel()
        if response is None:
            raise _ended_by_the_daemon()
        return response

    def close(self) -> None:
        """Close this end of the stream, so that the daemon ends the session; stop the heartbeats of a broken stream."""
        self._closing.set()

    def cancel(self) -> None:
        """Cancel the call if it has not ended."""
        self.call.cancel()

    def _requests(self, hello: pb.SessionRequest.Hello) -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(hello=hello)
        while not self._closing.wait(self.interval_seconds):
            yield pb.SessionRequest(heartbeat=pb.Heartbeat())


def _ended_by_the_daemon() -> StoreError:
    return StoreUnavailableError(
        grpc.StatusCode.CANCELLED,
        "the store daemon has ended the session: look at its log, then restart the job; it resumes from the last "
        "commit",
    )


def _restarted() -> DaemonRestartedError:
    return DaemonRestartedError(
        grpc.StatusCode.UNAVAILABLE,
        "the store daemon was restarted: what was not committed is gone; restart the job, it resumes from the last "
        "commit",
    )


def _translate_end(failure: grpc.RpcError) -> StoreError:
    """Return the error for the end of a stream; if the daemon does not know the session, it has ended the session."""
    error = translate(failure)
    return session_ended() if error.code is grpc.StatusCode.NOT_FOUND else error
