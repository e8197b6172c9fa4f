"""The session with the daemon: one bidirectional stream whose heartbeats show that this process is alive.

This module owns the stream and the thread that reads it. If the stream breaks, the thread resumes the session with a
new stream. Only the daemon's answer decides whether the session goes on: a daemon that does not answer may be suspended
and still have the session. The training loop must never drive the stream, because heartbeats have to go on while a step
computes. This module uses grpc's synchronous API, because a trainer may run an event loop of its own.
"""

from __future__ import annotations

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
from trainer_client.base.log_context import carried
from trainer_client.client.transport.arena import session_ended
from trainer_client.client.transport.backoff import Backoff
from trainer_client.client.transport.channel import CONTROL_DEADLINE_SECONDS, translate
from trainer_client.client.transport.own_process import OwnProcess
from trainer_client.client.transport.session_state import SessionState, SessionVerb, following
from trainer_client.errors import (
    ConfigError,
    DaemonRestartedError,
    SessionEndedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)

log = logging.getLogger(__name__)

# The limits of the first and of the longest pause between two attempts to resume the session; see backoff.py.
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
# The client tries to resume the session for this long after the grace time, because the daemon may notice the broken
# stream later than the client, so that the daemon's grace time ends later. After that, the client tries over new
# channels with newly read credentials files, because a restarted daemon may require other credentials.
_SLACK_SECONDS = 1.0
# The status codes of a stream that the daemon has not answered, so the client tries another stream. CANCELLED is the
# code of a stream that was cancelled after a time-out.
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

# The events in the daemon's notices that are logged at level INFO; other events are logged as warnings.
_ORDINARY = (
    pb.SessionResponse.EVENT_TIER_RECOVERED,
    pb.SessionResponse.EVENT_BUDGET_RELIEVED,
    pb.SessionResponse.EVENT_RANK_CLOSED,
)

# A function that is called when another rank of this session's run has gone. Its arguments are the daemon's text about
# that rank, and whether that rank has closed its session by itself.
OnRankGone = Callable[[str, bool], None]


class Session:
    """This process's session with a daemon, which the constructor opens and `close` ends.

    Attributes:
        process: the process that has opened the session. A forked child of it must not use the session.
        left_at: the time at which the session was last left in state ATTACHED, in seconds of time.monotonic().
        is_pressed: whether requests wait for room in host memory, by the daemon's last notice about that.
        stream_number: the number of the newest stream on which the daemon has welcomed the session.

    Args:
        stub: makes the calls.
        client: name of this client, shown to people who operate the daemon.
        registers_arena: whether this process may register the arena with a device while the session lasts.
        on_lost: called once, on the session's thread, if the session ends otherwise than by `close`.
        on_rank_gone: called on the session's thread when another rank of the run has gone.
        connect: opens another channel to the daemon, over which the session may be resumed. Without it, only `stub` is
            used.
        patience_seconds: how long to try to resume the session with a daemon that does not answer. It is at least a
            little longer than the daemon's grace time.
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
        connect: Callable[[], grpc.Channel] | None = None,
        patience_seconds: float = 0.0,
        timeout_seconds: float = CONTROL_DEADLINE_SECONDS,
    ) -> None:
        self._stub = stub
        self._client = client
        self._on_lost = on_lost
        self._on_rank_gone = on_rank_gone
        self.process = OwnProcess()
        self._connect = connect
        self._patience_seconds = patience_seconds
        self._changed = threading.Condition()
        self._state = SessionState.OPENING
        self._failure: StoreError | None = None
        self.left_at = 0.0
        self.is_pressed = False
        # The daemon's notices that other ranks have gone: the text, and whether the rank has closed its session. They
        # are reported to `on_rank_gone` when the daemon's next message shows that the daemon has not ended this
        # session, too.
        self._gone: list[tuple[str, bool]] = []
        # The new channel over which the session was resumed. None if the session still uses the channel of the caller.
        self._channel: grpc.Channel | None = None
        self._welcome = pb.SessionResponse.Welcome()
        self.stream_number = self._last_number = 0
        hello = pb.SessionRequest.Hello(client=client, registers_arena=registers_arena, capabilities=CAPABILITIES)
        self._stream = _Stream(stub, hello)
        self._thread = threading.Thread(target=carried(self._run), name="paramserver-session", daemon=True)
        self._thread.start()
        with self._changed:
            welcomed = self._changed.wait_for(lambda: self._state is not SessionState.OPENING, timeout_seconds)
        if not welcomed:
            # If the daemon has opened the session, and its answer did not arrive, the session ends at the daemon after
            # the grace time.
            self.break_off()
            raise StoreTimeoutError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the daemon did not welcome the session within {timeout_seconds:.3g} s",
            )
        self.check()

    @property
    def state(self) -> SessionState:
        """The state that the session is in now."""
        return self._state

    @property
    def is_attached(self) -> bool:
        """Whether calls of the session can be made now: its stream is not broken, and the session has not ended."""
        return self._state is SessionState.ATTACHED

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, so that none of its calls can succeed any more."""
        return self._state.is_over

    @property
    def welcome(self) -> pb.SessionResponse.Welcome:
        """The daemon's Welcome message, with its limits and the session's id."""
        return self._welcome

    @property
    def failure(self) -> StoreError | None:
        """The error that ended the session; None while the session has not ended."""
        return self._failure

    def ended_by(self, epoch: str) -> SessionEndedError | None:
        """Return the error with which the daemon that has the random name `epoch` has ended this session.

        Return None if the session has not ended, or if that daemon has not ended it.
        """
        has_ended = self._state is SessionState.ENDED and self._welcome.epoch == epoch
        return self._failure if has_ended and isinstance(self._failure, SessionEndedError) else None

    def check(self) -> None:
        """Raise the StoreError that ended the session, if it has ended; all its leases are void then."""
        self.process.check()
        if self._failure is not None:
            raise type(self._failure)(self._failure.code, self._failure.message)

    def wait_until_attached(self, timeout_seconds: float | None = None) -> None:
        """Wait while the session's thread tries to resume a broken stream, so that the caller's next call can succeed.

        Without `timeout_seconds` the wait lasts at most as long as the session's patience.

        Raises:
            StoreTimeoutError: `timeout_seconds` are over, and the session may still be resumed.
            StoreError: the session has ended.
        """
        self.process.check()
        if self._state is SessionState.BROKEN:
            with self._changed:
                decided = self._changed.wait_for(lambda: self._state is not SessionState.BROKEN, timeout_seconds)
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
            self._changed.wait_for(lambda: self._state is not SessionState.ATTACHED, seconds)
            self._changed.wait_for(lambda: self._state is not SessionState.BROKEN)
            return self._failure is not None

    def lose_patience(self) -> None:
        """Wait for a daemon that does not answer only as long as its grace time, and not for `patience_seconds`."""
        with self._changed:
            self._patience_seconds = 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """End the session; idempotent."""
        self._enter(SessionVerb.CLOSE)
        self._stream.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        self._stream.cancel()
        self._close_channel()

    def break_off(self) -> None:
        """Leave the session as if the connection were lost, so that the daemon keeps it for its grace time."""
        self._enter(SessionVerb.CLOSE)
        self._stream.cancel()
        self._stream.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        self._close_channel()

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:
            if self._failure is not None:
                raise
            if self._state is SessionState.CLOSED:
                return
            log.exception("the session with the store cannot be kept")
            # The session is marked as failed, because its callers would otherwise wait without end for this thread to
            # resume the session.
            self._fail(
                StoreUnavailableError(
                    grpc.StatusCode.UNKNOWN,
                    f"this process cannot keep its session with the store ({error}): restart the job; it resumes from "
                    "the last commit",
                )
            )

    def _keep(self) -> None:
        while (error := self._listen()) is not None:
            if error.code is not grpc.StatusCode.UNAVAILABLE or self._state is not SessionState.ATTACHED:
                self._fail(error)
                return
            self._enter(SessionVerb.DETACH)
            log.warning("the session's stream broke (%s); resuming the session", error.message)
            try:
                self._take_up(error)
            except StoreError as final:
                self._fail(final)
                return

    def _listen(self) -> StoreError | None:
        """Read the stream to its end. Return the error that ended it, or None if this client has left the session."""
        error: StoreError | None = None
        try:
            for response in self._stream.call:
                self._on_response(response)
            error = _ended_by_the_daemon()
        except grpc.RpcError as failure:
            error = _translate_end(failure)
        finally:
            self._stream.close()
        return None if self._state is SessionState.CLOSED else error

    def _on_response(self, response: pb.SessionResponse) -> None:
        # The daemon's message shows that the daemon still had this session when it sent the message, so the earlier
        # notices in `_gone` can be reported.
        gone, self._gone = self._gone, []
        match response.WhichOneof("message"):
            case "welcome":
                self._stream.interval_seconds = response.welcome.heartbeat_interval_millis / 1000
                self._welcome = response.welcome
                self.stream_number = self._last_number
                self._enter(SessionVerb.ATTACH)
            case "notice":
                self._on_notice(response.notice.event, printable(response.notice.text))
        for text, is_closed in gone:
            self._on_rank_gone(text, is_closed)

    def _on_notice(self, event: pb.SessionResponse.Event, text: str) -> None:
        log.log(logging.INFO if event in _ORDINARY else logging.WARNING, "store daemon: %s", text)
        if event in (pb.SessionResponse.EVENT_BUDGET_PRESSURE, pb.SessionResponse.EVENT_BUDGET_RELIEVED):
            self.is_pressed = event == pb.SessionResponse.EVENT_BUDGET_PRESSURE
        if event in (pb.SessionResponse.EVENT_RANK_GONE, pb.SessionResponse.EVENT_RANK_CLOSED):
            # If all processes of a run were suspended, the daemon ends one session after the other, and each process
            # reads the notices about the other ranks when it goes on. A process reports the notices only if the daemon
            # still has the process's own session, so it sends a heartbeat and waits for the answer.
            self._gone.append((text, event == pb.SessionResponse.EVENT_RANK_CLOSED))
            self._stream.send_heartbeat()

    def _take_up(self, cause: StoreError) -> None:
        """Open streams until the daemon resumes the session on one of them, or this client leaves the session.

        Raises:
            StoreError: the session has ended.
        """
        began = time.monotonic()
        grace_seconds = self._welcome.grace_millis / 1000 + _SLACK_SECONDS
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while self._pause(backoff.next_seconds()):
            silent_seconds = time.monotonic() - began
            remaining = max(grace_seconds, self._patience_seconds) - silent_seconds
            if remaining <= 0:
                raise cause
            try:
                stub = self._stub if silent_seconds <= grace_seconds else self._connect_again()
            except (ConfigError, StoreUnavailableError) as error:
                # A credentials file may be only half written yet, so the error is only logged, and the attempt to
                # resume the session is repeated.
                log.debug("no channel to the daemon can be opened: %s", error)
                continue
            self._last_number += 1
            hello = pb.SessionRequest.Hello(
                client=self._client,
                session_id=self._welcome.session_id,
                capabilities=CAPABILITIES,
                stream_number=self._last_number,
            )
            self._stream = _Stream(stub, hello)
            try:
                self._on_response(self._stream.first_response(remaining))
            except StoreError as error:
                self._stream.close()
                if error.code in _NO_ANSWER:
                    continue
                # A daemon that does not know the session adds its epoch to its answer, the random name that it gave
                # itself at its start. If the epoch is not that of the session, the daemon was restarted.
                epoch = epoch_of(self._stream.call.trailing_metadata())
                if epoch is None or epoch == self._welcome.epoch:
                    raise
                raise _restarted() from None
            else:
                log.warning("the session is resumed after %.1f s", time.monotonic() - self.left_at)
                return

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt to resume the session; return False if this client has left the session."""
        patience = self._patience_seconds
        with self._changed:
            self._changed.wait_for(
                lambda: self._state is SessionState.CLOSED or self._patience_seconds != patience, seconds
            )
            return self._state is not SessionState.CLOSED

    def _connect_again(self) -> pb_grpc.ParameterStoreStub:
        """Open another channel to the daemon, close the last such one, and return the stub of the new channel.

        It can raise ConfigError and StoreUnavailableError.
        """
        if self._connect is None:
            return self._stub
        self._close_channel()
        self._channel = self._connect()
        return pb_grpc.ParameterStoreStub(self._channel)

    def _enter(self, verb: SessionVerb) -> None:
        with self._changed:
            if self._state is SessionState.ATTACHED:
                self.left_at = time.monotonic()
            self._state = following(self._state, verb)
            self._changed.notify_all()

    def _fail(self, error: StoreError) -> None:
        """End the session with the error that is its reason, unless this client has left it."""
        with self._changed:
            if self._state is SessionState.CLOSED:
                return
            self._failure = error
            self._enter(SessionVerb.END if isinstance(error, SessionEndedError) else SessionVerb.LOSE)
        self._on_lost(error)


class _Stream:
    """One call of the RPC `Session`; a session has a new one each time it is resumed."""

    def __init__(self, stub: pb_grpc.ParameterStoreStub, hello: pb.SessionRequest.Hello) -> None:
        self.interval_seconds = 1.0
        self._is_closing = False
        # An event that ends the pause before the next heartbeat, so that the heartbeat is sent at once.
        self._wake = threading.Event()
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
        self._is_closing = True
        self._wake.set()

    def send_heartbeat(self) -> None:
        """Send the next heartbeat at once, instead of after the interval between heartbeats."""
        self._wake.set()

    def cancel(self) -> None:
        """Cancel the call if it has not ended."""
        self.call.cancel()

    def _requests(self, hello: pb.SessionRequest.Hello) -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(hello=hello)
        while True:
            self._wake.wait(self.interval_seconds)
            self._wake.clear()
            if self._is_closing:
                return
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
