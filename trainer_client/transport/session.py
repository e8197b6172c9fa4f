"""The session with the daemon: one bidirectional stream that carries this process's liveness.

Owns the stream and the thread that reads it; takes the session up again when the stream breaks, within the grace time
that the daemon allows. Must never be driven by the training loop: heartbeats go on while a step computes. grpc's
synchronous API, for a trainer may run an event loop of its own.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from paramserver.contract.printable import printable
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.errors import DaemonRestartedError, StoreError, StoreTimeoutError, StoreUnavailableError
from trainer_client.transport.arena import session_ended
from trainer_client.transport.backoff import Backoff
from trainer_client.transport.channel import CONTROL_DEADLINE_SECONDS, translate

log = logging.getLogger(__name__)

# Between attempts to take the session up.
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
# The daemon may notice a break later than we do: its grace time ends later, too.
_SLACK_SECONDS = 1.0

_GOOD_NEWS = (pb.SessionResponse.EVENT_TIER_RECOVERED, pb.SessionResponse.EVENT_BUDGET_RELIEVED)


class SessionState(enum.Enum):
    """What a session can be used for."""

    OPENING = enum.auto()
    """The daemon has not welcomed us yet."""

    ATTACHED = enum.auto()
    """Calls can be made."""

    BROKEN = enum.auto()
    """The stream broke and is being taken up again: leases are good, calls would fail."""

    LOST = enum.auto()
    """The session is over, and all its leases void."""


class Session:
    """Opens on construction.

    Attributes:
        left_at: when calls were last possible, in seconds of time.monotonic(), once they are not.

    Args:
        client: who we are, for people.
        on_lost: called once, on the session's thread, when the session ends otherwise than by `close`.

    Raises:
        StoreError: the daemon does not welcome us.
    """

    def __init__(
        self,
        stub: pb_grpc.ParameterStoreStub,
        client: str,
        on_lost: Callable[[StoreError], None] = lambda _: None,
    ) -> None:
        self._stub = stub
        self._client = client
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._state = SessionState.OPENING
        self._failure: StoreError | None = None
        self.left_at = 0.0
        self._closing = threading.Event()
        self._welcome = pb.SessionResponse.Welcome()
        self._stream = _Stream(stub, pb.SessionRequest.Hello(client=client))
        self._thread = threading.Thread(target=self._run, name="paramserver-session", daemon=True)
        self._thread.start()
        with self._changed:
            welcomed = self._changed.wait_for(lambda: self._state is not SessionState.OPENING, CONTROL_DEADLINE_SECONDS)
        if not welcomed:
            self.close()
            raise StoreTimeoutError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the daemon did not welcome the session within {CONTROL_DEADLINE_SECONDS:g} s",
            )
        self.check()

    @property
    def welcome(self) -> pb.SessionResponse.Welcome:
        """What the daemon said when it opened the session."""
        return self._welcome

    @property
    def failure(self) -> StoreError | None:
        """Why the session is over; None: it is not."""
        return self._failure

    def check(self) -> None:
        """Raises StoreError if the session is over: all leases are void then."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.code, self._failure.message)

    def wait_until_attached(self, timeout_seconds: float | None = None) -> None:
        """Waits while a broken stream is being taken up again, at most a little longer than the daemon's grace time; to
        be called before a call that is not to fail for that.

        Raises:
            StoreTimeoutError: the time is over, the session may not be.
            StoreError: the session is over.
        """
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
        """Whether the session is over, or shows within some seconds that it is: a call may fail before the stream does.

        Where the stream has broken, waits until it is taken up again or given up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state is not SessionState.ATTACHED or self._closing.is_set(), seconds)
            self._changed.wait_for(lambda: self._state is not SessionState.BROKEN or self._closing.is_set())
            return self._state is SessionState.LOST

    def close(self) -> None:
        """Ends the session; idempotent."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._stream.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        self._stream.cancel()

    def _run(self) -> None:
        while (error := self._listen()) is not None:
            if error.code is not grpc.StatusCode.UNAVAILABLE or self._state is not SessionState.ATTACHED:
                self._lose(error)
                return
            self._enter(SessionState.BROKEN)
            log.warning("the session's stream broke (%s); taking it up again", error.message)
            try:
                self._take_up(error)
            except StoreError as final:
                self._lose(final)
                return

    def _listen(self) -> StoreError | None:
        """Reads the stream to its end; why it ended, None if we closed it."""
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
                level = logging.INFO if response.notice.event in _GOOD_NEWS else logging.WARNING
                log.log(level, "store daemon: %s", printable(response.notice.text))

    def _take_up(self, cause: StoreError) -> None:
        """Opens streams until one is welcomed.

        Raises:
            StoreError: why the session is over.
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
                if error.code is grpc.StatusCode.NOT_FOUND:
                    raise self._why_unknown(error) from error
                if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
            else:
                log.warning("the session goes on")
                return

    def _why_unknown(self, error: StoreError) -> StoreError:
        """The daemon does not know our session: it has ended it, or is another one."""
        probe = _Stream(self._stub, pb.SessionRequest.Hello(client=self._client))
        probe.close()
        try:
            epoch = probe.first_response(CONTROL_DEADLINE_SECONDS).welcome.epoch
        except StoreError:
            return error
        if epoch == self._welcome.epoch:
            return error
        return DaemonRestartedError(
            grpc.StatusCode.UNAVAILABLE,
            "the store daemon was restarted: what was not committed is gone; restart the job, it resumes from the last "
            "commit",
        )

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
    """One call of Session."""

    def __init__(self, stub: pb_grpc.ParameterStoreStub, hello: pb.SessionRequest.Hello) -> None:
        self.interval_seconds = 1.0
        self._closing = threading.Event()
        self.call: Any = stub.Session(self._requests(hello))

    def first_response(self, timeout_seconds: float) -> pb.SessionResponse:
        """Raises StoreError, with code CANCELLED where nothing came in time."""
        alarm = threading.Timer(timeout_seconds, self.call.cancel)
        alarm.start()
        try:
            response: pb.SessionResponse | None = next(self.call, None)
        except grpc.RpcError as failure:
            raise _translate_end(failure) from failure
        finally:
            alarm.cancel()
        if response is None:
            raise _ended_by_the_daemon()
        return response

    def close(self) -> None:
        """Says that we are done, which ends the session; of a broken stream, that nothing more will come."""
        self._closing.set()

    def cancel(self) -> None:
        """Breaks the stream off, where it has not ended."""
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


def _translate_end(failure: grpc.RpcError) -> StoreError:
    """Our error for the end of a stream: where the session is unknown, it has ended."""
    error = translate(failure)
    return session_ended() if error.code is grpc.StatusCode.NOT_FOUND else error
