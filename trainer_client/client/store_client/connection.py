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

# The longest deadline that is passed to gRPC, a year, because gRPC takes a deadline that is a few hundred years away
# for one that has passed.
_LONGEST_SECONDS = 365 * 86_400.0
# The longest time that `Connection.close` waits for gRPC to close the channel.
_CLOSE_SECONDS = 5.0


class CallCancelledError(Exception):
    """A method of `Call` raises this after `Call.cancel`, to end the cancelled call. It never reaches a user."""


class Call:
    """One call of a method of the client by a user: its deadline, and what is needed to cancel it.

    The methods of the client pass the object on to each request that they make for the call.
    """

    def __init__(self, timeout: Timeout, default_seconds: float = math.inf) -> None:
        """Start the deadline, which is `default_seconds` if `timeout` is None.

        Raises:
            ConfigError: the timeout is not positive.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        # The seconds that `allow` has added to the default deadline of this call so far, so that a repeated `allow`
        # adds only what is missing.
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
        """Return the call of a method that was given `timeout`: `timeout` itself if it is a Call, or a new call.

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
        """End the call as soon as possible: cancel its streams, and have `check` raise from now on.

        Any thread may call this.
        """
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
        """Enclose code that reads or writes the user's tensors, so that `wait_for_memory` waits for its end.

        At its beginning, the context raises what `check` raises.
        """
        with self._memory:
            self.check()
            yield

    def wait_for_memory(self) -> None:
        """Wait until the code that `at_memory` encloses has ended. Call `cancel` first, so that none begins later."""
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
    """A gRPC channel whose streams are cancelled when a given `Call` is cancelled."""

    def __init__(self, channel: grpc.Channel, call: Call) -> None:
        self._channel = channel
        self._call = call

    def stream_stream(self, method: str) -> Callable[..., Any]:
        begin: Any = self._channel.stream_stream(method)
        return lambda *arguments, **options: self._call.track(begin(*arguments, **options))


class StoreSession(OpenSession):
    """One session with the daemon. Each of its calls has the deadline of the user's call that needs it."""

    def __init__(self, channel: grpc.Channel, client: str, *, prefer_streams: bool, timeout_seconds: float) -> None:
        """Open a session with the daemon, which has to answer within `timeout_seconds`; see OpenSession."""
        self._channel = channel
        self._is_closed = False
        begin = partial(Session, client=client, timeout_seconds=timeout_seconds)
        super().__init__(channel, begin, prefer_streams=prefer_streams)

    @property
    def has_ended(self) -> bool:
        """Whether this client knows that the session has ended. The daemon may have ended it unnoticed."""
        return self.session.failure is not None

    def goes_on(self, call: Call) -> bool:
        """Return whether the session has not ended. If its stream is broken, wait first until that is certain.

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

        After the error NOT_FOUND, the result tells its cause: the session has ended, or the requested job, step or
        tensor does not exist.
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
        """Begin a unary call, without waiting, and return grpc's future of it.

        The deadline of `call` is extended by the time for which the daemon may let the request wait.
        """
        request.session_id = self.session_id
        call.allow(patience_seconds(self.session.welcome))
        future = self._invoke(getattr(self.stub, method).future, request, timeout=call.left_seconds)
        # This callback does nothing. It is added because grpc otherwise cancels a call when the call's future is
        # garbage-collected.
        future.add_done_callback(lambda _: None)
        return future

    def stream(self, method: str, request: Any, call: Call) -> Iterator[Any]:
        """Call a method of the store that answers with a stream, and yield the responses. It can raise StoreError."""
        request.session_id = self.session_id
        responses = call.track(self._invoke(getattr(self.stub, method), request, timeout=call.left_seconds))
        try:
            yield from responses
        except grpc.RpcError as error:
            raise translate(error) from None
        finally:
            responses.cancel()

    def watch(self, job: str, call: Call, *, settled: bool = True) -> Any:
        """Begin the call WatchJob, which reports each commit of a job, and return grpc's iterator of its responses."""
        request = pb.WatchJobRequest(session_id=self.session_id, job=job, unsettled=not settled)
        return call.track(self._invoke(self.stub.WatchJob, request))

    def _check_open(self) -> None:
        self.session.process.check()
        # A call on a closed channel would fail with ValueError, which grpc's interceptors hide in the result of the
        # call. So it is checked beforehand whether the session is closed.
        if self._is_closed:
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed")

    def _invoke(self, method: Any, request: Any, **options: Any) -> Any:
        self._check_open()
        try:
            return method(request, **options)
        except ValueError:
            # gRPC raises ValueError for a call on a closed channel, so the ValueError means that the client was closed.
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the client was closed") from None

    def call(self, method: str, request: Any, call: Call) -> Any:
        """Call a unary method of the store, and return its response. It can raise StoreError."""
        return result_of(self.begin(method, request, call))


class Connection:
    """A client's channel to the daemon, its session, and the further sessions that its writers open.

    If the client's session has ended, for example because the daemon was restarted, the next call opens another one.
    """

    def __init__(self, address: str, client: str, credentials: Credentials, *, prefer_streams: bool) -> None:
        """Check the arguments. The first call that needs a session connects to the daemon.

        Raises:
            ConfigError: the address is malformed, or the credentials cannot be used.
        """
        self.address = address
        self._client = client
        self._prefer_streams = prefer_streams
        self._channel = open_channel(address, credentials)
        self._process = OwnProcess()
        self._lock = threading.Lock()
        self._session: StoreSession | None = None
        # Whether the last attempt to open a session has found no daemon, so that the log has only one warning for
        # repeated attempts.
        self._is_missed = False
        # All sessions on the channel that may still be open, which `close` ends, and the lock that guards this set and
        # `_closed`.
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
        # `close` of a gRPC channel may never return: it waits for a call that a signal handler's exception has
        # interrupted at its beginning. So the channel is closed on a thread, and this method waits for that thread only
        # for a limited time.
        closing = threading.Thread(target=self._channel.close, name="close a channel", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def new_session(self, call: Call | None = None, *, maps_memory: bool = True) -> StoreSession:
        """Open a further session, which the caller closes, unless `Connection.close` does so first.

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
        """Call a method of the gRPC service StoreAdmin, and return its response. It can raise StoreError."""
        self._process.check()
        try:
            return getattr(StoreAdminStub(self._channel), method)(request, timeout=call.left_seconds)
        except grpc.RpcError as error:
            raise translate(error) from None
        except ValueError:
            # gRPC raises ValueError for a call on a closed channel, so the ValueError means that the client was closed.
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the client was closed") from None

    def session(self, call: Call) -> StoreSession:
        """Return the client's session. If the session has ended, open another one and return that.

        Raises:
            ConfigError: the connection was closed.
            StoreError: the daemon refuses the session or does not answer in time.
        """
        self._check_open()
        session = self._session
        if session is not None and session.goes_on(call):
            return session
        # Another thread may hold this lock while it opens a session, for longer than this caller may wait. So the wait
        # for the lock is limited by the caller's deadline.
        while not self._lock.acquire(timeout=call.left_seconds):
            pass
        try:
            # Another thread may have replaced the session while this thread waited for the lock. Then `_session` is the
            # new session, so it is not removed.
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
        """Open another session in place of the ended one. Only the first of several failures is logged as a warning."""
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
        """The random name that the daemon gave itself at its start, or "" before the first session.

        This is the name in the daemon's answer to the newest session of this connection.
        """
        return "" if self._session is None else self._session.epoch

    @property
    def maps_memory(self) -> bool:
        """Whether the newest session copies tensors from and to the mapped arena. If not, gRPC sends them."""
        return self._session is not None and self._session.arena is not None

    def resume(self, call: Call, attempt: Callable[[StoreSession], T]) -> T:
        """Call `attempt` with the session and return its result; call it again after each break of the connection.

        If the session has ended, `attempt` gets a new one. `attempt` must be idempotent.

        Raises:
            StoreError: the store refuses, or the deadline has passed.
        """
        return resume(call, lambda: self.session(call), attempt)


def resume(call: Call, session_of: Callable[[], StoreSession], attempt: Callable[[StoreSession], T]) -> T:
    """Call `attempt` with the session that `session_of` returns, and return its result.

    After each break of the connection, `attempt` is called again; see Connection.resume.
    """
    backoff = Backoff()
    while True:
        call.check()
        session: StoreSession | None = None
        try:
            session = session_of()
            return attempt(session)
        except (StoreUnavailableError, StoreNotFoundError) as error:
            # The store answers with NOT_FOUND if it does not know the session any more, and then the call is repeated
            # on a new session. If the store still knows the session, the tensor, job or step of the request does not
            # exist, so another attempt would not help and the error is raised.
            if isinstance(error, StoreNotFoundError) and (session is None or session.is_known(call)):
                raise
            failure = error
        try:
            call.pause(backoff.next_seconds())
        except StoreTimeoutError:
            # If the time is over, the failure of the last attempt is raised instead of the time-out, because it tells
            # the user more.
            raise failure from None


def result_of(future: Any) -> Any:
    """Wait for the response of a gRPC call, given its future, and return the response. It can raise StoreError."""
    try:
        return future.result()
    except grpc.RpcError as error:
        raise translate(error) from None
    except grpc.FutureCancelledError:
        raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the call was cancelled") from None


def release(session: StoreSession, lease_ids: Iterable[int]) -> None:
    """Release leases of `session` without waiting for the daemon's answer.

    A failure is ignored: the call fails only if the session has ended, and then its leases have ended, too.
    """
    releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease_id) for lease_id in lease_ids]
    with contextlib.suppress(StoreError):
        session.begin("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases), Call(None, CONTROL_DEADLINE_SECONDS))


class LeaseRequest:
    """A request for leases, of which the store grants all or none. The caller uses the leases or calls `give_back`."""

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
