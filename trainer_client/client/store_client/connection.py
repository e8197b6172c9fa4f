"""A StoreClient's connection to its daemon: a session that is opened again after the daemon's restart, and deadlines.

This module owns the channel and the sessions. It uses grpc's synchronous API on the caller's threads, because grpc.aio
does not work reliably with two event loops in one process. It must never repeat a call that may have been executed, so
`resume` is for idempotent calls only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import grpc
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub
from trainer_client.client.transport.attachment import OpenSession
from trainer_client.client.transport.backoff import Backoff
from trainer_client.client.transport.channel import CONTROL_DEADLINE_SECONDS, open_channel, translate, waiting_line
from trainer_client.client.transport.credentials import Credentials
from trainer_client.client.transport.deadlines import patience_seconds
from trainer_client.client.transport.own_process import OwnProcess
from trainer_client.client.transport.session import Session
from trainer_client.client.transport.streams import Streams
from trainer_client.errors import ConfigError, StoreError, StoreNotFoundError, StoreTimeoutError, StoreUnavailableError

log = logging.getLogger(__name__)

Timeout = float | timedelta | None

T = TypeVar("T")

# gRPC takes a deadline that is a few hundred years away for one that has passed.
_LONGEST_SECONDS = 365 * 86_400.0
# The most time that the end of a connection takes.
_CLOSE_SECONDS = 5.0


class CallCancelledError(Exception):
    """The call was cancelled, so its result is not wanted any more. This error never reaches a user."""


class Call:
    """One call of a user: its deadline, whether it was cancelled, and whether it is using the user's tensors."""

    def __init__(self, timeout: Timeout, default_seconds: float = math.inf) -> None:
        """Start the deadline, which is `default_seconds` if `timeout` is None.

        Raises:
            ConfigError: the timeout is not positive.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        # The seconds that `allow` has added to a default deadline.
        self._allowed_seconds = 0.0
        self._is_default = seconds is None
        self.seconds = default_seconds if seconds is None else min(float(seconds), _LONGEST_SECONDS)
        if not self.seconds > 0:
            raise ConfigError(f"timeout {timeout} must be positive; leave it out for the default")
        self._began = time.monotonic()
        self._at = self._began + self.seconds
        self._cancelled = threading.Event()
        self._memory = threading.Lock()
        self._streams: set[Any] = set()

    @classmethod
    def of(cls, timeout: Timeout | Call, default_seconds: float) -> Call:
        """Return the call of a method that was given `timeout`: one that begins now, or that of which it is a part.

        If the call has no deadline, it gets one, `default_seconds` after its beginning.
        """
        call = timeout if isinstance(timeout, Call) else cls(timeout, default_seconds)
        if math.isinf(call.seconds):
            call.seconds = default_seconds
            call._at = call._began + default_seconds
        return call

    @property
    def left_seconds(self) -> float:
        """The seconds until the deadline, at least 0.001. It raises what `check` raises."""
        self.check()
        return max(0.001, self._at - time.monotonic())

    def check(self) -> None:
        """Raise StoreTimeoutError after the deadline, or CallCancelledError after `cancel`."""
        if self._cancelled.is_set():
            raise CallCancelledError
        if time.monotonic() >= self._at:
            raise StoreTimeoutError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the call was not done within its {self.seconds:g} s"
            )

    def cancel(self) -> None:
        """End the call as soon as possible. Any thread may call this."""
        self._cancelled.set()
        for stream in tuple(self._streams):
            stream.cancel()

    def allow(self, patience_seconds: float) -> None:
        """Extend the deadline by the seconds that the daemon may let a call wait, unless the user has set the deadline.

        A later call with a longer patience extends the deadline by the difference.
        """
        if self._is_default and patience_seconds > self._allowed_seconds:
            more = patience_seconds - self._allowed_seconds
            self._allowed_seconds = patience_seconds
            self.seconds += more
            self._at += more

    def extend(self) -> None:
        """Restart the deadline with its full duration. Raise CallCancelledError after `cancel`."""
        self._at = time.monotonic() + self.seconds
        self.check()

    def pause(self, seconds: float) -> None:
        """Sleep, at most until the deadline. It raises what `check` raises."""
        self._cancelled.wait(min(seconds, self.left_seconds))
        self.check()

    @contextlib.contextmanager
    def at_memory(self) -> Iterator[None]:
        """Enclose code that uses the user's tensors, so that `wait_for_memory` can wait for it.

        It raises what `check` raises.
        """
        with self._memory:
            self.check()
            yield

    def wait_for_memory(self) -> None:
        """Wait, after `cancel`, until the user's tensors are not used any more."""
        with self._memory:
            pass

    def track(self, stream: Any) -> Any:
        """Let `cancel` also cancel this stream from now on, and return the stream."""
        self._streams.add(stream)
        if not stream.add_callback(lambda: self._streams.discard(stream)):
            self._streams.discard(stream)
        if self._cancelled.is_set():
            stream.cancel()
        return stream


class _CancellableChannel:
    """A channel that tracks its streams in a `Call`, so that they end when the call is cancelled."""

    def __init__(self, channel: grpc.Channel, call: Call) -> None:
        self._channel = channel
        self._call = call

    def stream_stream(self, method: str) -> Callable[..., Any]:
        begin: Any = self._channel.stream_stream(method)
        return lambda *arguments, **options: self._call.track(begin(*arguments, **options))


class StoreSession(OpenSession):
    """One session with the daemon, whose calls keep the deadlines of calls of a user."""

    def __init__(self, channel: grpc.Channel, client: str, *, prefer_streams: bool, timeout_seconds: float) -> None:
        """Open the session, within `timeout_seconds`; see OpenSession."""
        self._channel = channel
        self._is_closed = False
        begin = partial(Session, client=client, timeout_seconds=timeout_seconds)
        super().__init__(channel, begin, prefer_streams=prefer_streams)

    @property
    def has_ended(self) -> bool:
        """Whether the session is known to have ended."""
        return self.session.failure is not None

    def goes_on(self, call: Call) -> bool:
        """Wait until a broken stream is resumed or the session has ended, and return whether the session goes on.

        Raise StoreTimeoutError if the deadline passes meanwhile.
        """
        if self._is_closed:
            return False
        try:
            self.session.wait_until_attached(call.left_seconds)
        except StoreTimeoutError:
            raise
        except StoreError:
            return False
        return True

    def is_known(self, call: Call) -> bool:
        """Return whether the store knows the session.

        After NOT_FOUND, this tells whether the session has ended, or whether the requested job, step or tensor does not
        exist.
        """
        try:
            self.call("ReleaseLeases", pb.ReleaseLeasesRequest(), call)
        except StoreError:
            return False
        return True

    def close(self) -> None:
        """End the session, and with it its leases and readers; idempotent. In a forked child, this does nothing."""
        if self.session.process.is_here:
            self._is_closed = True
            super().close()

    def break_off(self) -> None:
        """Leave the session without closing it, so that the daemon treats the connection as lost, as after a kill."""
        self._is_closed = True
        if self.arena is not None:
            self.arena.close()
        self.session.break_off()

    def copy_out(self, call: Call, lease: pb.Lease, target: torch.Tensor) -> None:
        """Copy the bytes of a read lease to `target` (uint8), from the arena or by a stream.

        It can raise StoreError.
        """
        with call.at_memory():
            if self.arena is not None:
                target.copy_(self.arena.view(lease.arena_offset, lease.size_bytes))
                self.arena.check()
            else:
                source = pb.ReadRequest.Open(lease_id=lease.lease_id)
                self._streams(call).read(source, target.numpy().data, call.left_seconds)

    def copy_in(self, call: Call, lease: pb.Lease, source: torch.Tensor, at: int = 0) -> None:
        """Fill the bytes of a write lease from byte `at` on with `source` (uint8, on any device).

        It can raise StoreError.
        """
        with call.at_memory():
            if self.arena is not None:
                self.arena.view(lease.arena_offset, lease.size_bytes)[at : at + source.numel()] = source
                self.arena.check()
            else:
                self._streams(call).write(lease.lease_id, source.cpu().numpy().data, call.left_seconds, at)

    def _streams(self, call: Call) -> Streams:
        def check() -> None:
            call.check()
            self._check_open()
            self.session.check()

        channel: Any = _CancellableChannel(self._channel, call)
        return Streams(channel, self.session_id, check)

    def begin(self, method: str, request: Any, call: Call) -> Any:
        """Begin a unary call, which the daemon may let wait for its patience, and return grpc's future of it."""
        request.session_id = self.session_id
        call.allow(patience_seconds(self.session.welcome))
        future = self._invoke(getattr(self.stub, method).future, request, timeout=call.left_seconds)
        # This callback does nothing. It is added because grpc otherwise cancels the call when its future is
        # garbage-collected.
        future.add_done_callback(lambda _: None)
        return future

    def stream(self, method: str, request: Any, call: Call) -> Iterator[Any]:
        """Make a call that answers with a stream, and yield its responses. It can raise StoreError."""
        request.session_id = self.session_id
        responses = call.track(self._invoke(getattr(self.stub, method), request, timeout=call.left_seconds))
        try:
            yield from responses
        except grpc.RpcError as error:
            raise translate(error) from None
        finally:
            responses.cancel()

    def watch(self, job: str, call: Call, *, settled: bool = True) -> Any:
        """Begin the call WatchJob and return grpc's iterator of its responses."""
        request = pb.WatchJobRequest(session_id=self.session_id, job=job, unsettled=not settled)
        return call.track(self._invoke(self.stub.WatchJob, request))

    def _check_open(self) -> None:
        self.session.process.check()
        # A call on a closed channel would fail with ValueError, which grpc's interceptors hide in its result.
        if self._is_closed:
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed")

    def _invoke(self, method: Any, request: Any, **options: Any) -> Any:
        self._check_open()
        try:
            return method(request, **options)
        except ValueError:
            # grpc raises ValueError if the channel is closed.
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the client was closed") from None

    def call(self, method: str, request: Any, call: Call) -> Any:
        """Make a unary call and return its response. It can raise StoreError."""
        return result_of(self.begin(method, request, call))


class Connection:
    """A channel and one session on it, which is opened again when it has ended, and further sessions of callers."""

    def __init__(self, address: str, client: str, credentials: Credentials, *, prefer_streams: bool) -> None:
        """Prepare a connection, which is made on first use. Raise ConfigError for a bad address or bad credentials."""
        self.address = address
        self._client = client
        self._prefer_streams = prefer_streams
        self._channel = open_channel(address, credentials)
        self._process = OwnProcess()
        self._lock = threading.Lock()
        self._session: StoreSession | None = None
        # Whether the last attempt to open `_session` has found no daemon.
        self._is_missed = False
        # All sessions on the channel that may still be open, and the lock of this set and of `_closed`.
        self._opened: weakref.WeakSet[StoreSession] = weakref.WeakSet()
        self._closed = False
        self._closing = threading.Lock()

    def close(self) -> None:
        """End all sessions and close the channel; idempotent. In a forked child, this does nothing."""
        if not self._process.is_here:
            return
        with self._closing:
            self._closed = True
            opened = list(self._opened)
        for session in opened:
            session.close()
        # gRPC waits without end for a call that a signal handler's exception has interrupted while it was begun.
        closing = threading.Thread(target=self._channel.close, name="close a channel", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def new_session(self, call: Call | None = None, *, maps_memory: bool = True) -> StoreSession:
        """Open a further session, which the caller closes, unless `close` comes first.

        Args:
            call: its deadline limits how long the daemon may take to answer; None: only the default does.
            maps_memory: False: the session does not map the arena even if it could.

        Raises:
            ConfigError: the connection was closed.
            StoreError: the daemon refuses the session or does not answer in time.
        """
        self._check_open()
        seconds = CONTROL_DEADLINE_SECONDS if call is None else min(CONTROL_DEADLINE_SECONDS, call.left_seconds)
        session = StoreSession(
            self._channel,
            self._client,
            prefer_streams=self._prefer_streams or not maps_memory,
            timeout_seconds=seconds,
        )
        with self._closing:
            if not self._closed:
                self._opened.add(session)
                return session
        session.close()
        raise self._was_closed()

    def _check_open(self) -> None:
        self._process.check()
        if self._closed:
            raise self._was_closed()

    def _was_closed(self) -> ConfigError:
        return ConfigError(f"the client of {self.address} was closed; connect another")

    def admin_call(self, method: str, request: Any, call: Call) -> Any:
        """Make a call of StoreAdmin and return its response. It can raise StoreError."""
        self._process.check()
        try:
            return getattr(StoreAdminStub(self._channel), method)(request, timeout=call.left_seconds)
        except grpc.RpcError as error:
            raise translate(error) from None
        except ValueError:
            # grpc raises ValueError if the channel is closed.
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the client was closed") from None

    def session(self, call: Call) -> StoreSession:
        """Return the session; open it again if it has ended.

        Raises:
            ConfigError: the connection was closed.
            StoreError: the daemon refuses the session or does not answer in time.
        """
        self._check_open()
        session = self._session
        if session is not None and session.goes_on(call):
            return session
        # Another thread may be opening a session, for longer than the caller waits.
        while not self._lock.acquire(timeout=call.left_seconds):
            pass
        try:
            # Another thread may have opened a new session meanwhile. Then `_session` is that one, and stays.
            if self._session is session:
                self._session = None
                if session is not None:
                    session.close()
            if self._session is None:
                self._session = self._next_session(call)
            return self._session
        finally:
            self._lock.release()

    def _next_session(self, call: Call) -> StoreSession:
        """Open the next session. Log a warning at the first failure since the last session."""
        try:
            session = self.new_session(call)
        except StoreUnavailableError:
            if not self._is_missed:
                log.warning("paramserver: %s", waiting_line(self.address, call.seconds))
            self._is_missed = True
            raise
        self._is_missed = False
        return session

    @property
    def epoch(self) -> str:
        """The random name of the daemon's start, as of the last opened session; "" before the first one."""
        return "" if self._session is None else self._session.epoch

    @property
    def maps_memory(self) -> bool:
        """Whether bytes go through the mapped arena, as of the last opened session."""
        return self._session is not None and self._session.arena is not None

    def resume(self, call: Call, attempt: Callable[[StoreSession], T]) -> T:
        """Call `attempt` with the session and return its result; call it again after each break of the connection.

        If the session has ended, `attempt` gets a new one. It must be idempotent.

        Raises:
            StoreError: the store refuses, or the deadline has passed.
        """
        return resume(call, lambda: self.session(call), attempt)


def resume(call: Call, session_of: Callable[[], StoreSession], attempt: Callable[[StoreSession], T]) -> T:
    """Call `attempt` with the session of `session_of`, and again after each break; see Connection.resume."""
    backoff = Backoff()
    while True:
        call.check()
        session: StoreSession | None = None
        try:
            session = session_of()
            return attempt(session)
        except (StoreUnavailableError, StoreNotFoundError) as error:
            # The store also answers with NOT_FOUND if it does not know the session any more. If it still knows the
            # session, the tensor, job or step of the request does not exist, and another attempt would not help.
            if isinstance(error, StoreNotFoundError) and (session is None or session.is_known(call)):
                raise
            failure = error
        try:
            call.pause(backoff.next_seconds())
        except StoreTimeoutError:
            # The last failure is raised instead of the time-out, because it tells the user more.
            raise failure from None


def result_of(future: Any) -> Any:
    """Wait for the response of a call that was begun, and return it. It can raise StoreError."""
    try:
        return future.result()
    except grpc.RpcError as error:
        raise translate(error) from None
    except grpc.FutureCancelledError:
        raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the call was cancelled") from None


def release(session: StoreSession, lease_ids: Iterable[int]) -> None:
    """Release leases without waiting. A failure is ignored, because the leases then ended with their session."""
    releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease_id) for lease_id in lease_ids]
    with contextlib.suppress(StoreError):
        session.begin("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases), Call(None, CONTROL_DEADLINE_SECONDS))


class LeaseRequest:
    """A request for leases, all or none, that is under way in a session. Each is to be used or given back."""

    def __init__(self, session: StoreSession, wants: Sequence[pb.AcquireLeasesRequest.Want], call: Call) -> None:
        """Request leases within the deadline of `call`, without waiting. It can raise StoreError."""
        self.session = session
        self._future = session.begin("AcquireLeases", pb.AcquireLeasesRequest(wants=wants), call)

    @property
    def has_failed(self) -> bool:
        """Whether the store has refused the request, or the connection has broken. Another request may succeed."""
        return bool(self._future.done() and (self._future.cancelled() or self._future.exception() is not None))

    def granted(self) -> Sequence[pb.Lease]:
        """Wait for the leases, and return them in the order of the request. It can raise StoreError."""
        leases: Sequence[pb.Lease] = result_of(self._future).leases
        return leases

    def give_back(self) -> None:
        """Release the leases as soon as the store has granted them. It does not wait."""

        def on_done(future: Any) -> None:
            if not self.has_failed:
                release(self.session, [lease.lease_id for lease in future.result().leases])

        self._future.add_done_callback(on_done)
