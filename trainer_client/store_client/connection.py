"""The way of a StoreClient to its daemon: sessions that are opened again when the daemon was restarted, and calls that
end at their deadline.

Owns the channel and the sessions. grpc's synchronous API, on the caller's threads: two event loops in one process are
more than grpc.aio bears. Must never repeat what may have been executed: `resume` is for what may be done twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import grpc
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.errors import ConfigError, StoreError, StoreNotFoundError, StoreTimeoutError, StoreUnavailableError
from trainer_client.transport.arena import Arena
from trainer_client.transport.backoff import Backoff
from trainer_client.transport.channel import CONTROL_DEADLINE_SECONDS, open_channel, translate
from trainer_client.transport.credentials import Credentials
from trainer_client.transport.deadlines import patience_seconds
from trainer_client.transport.session import Session
from trainer_client.transport.streams import Streams

Timeout = float | timedelta | None

T = TypeVar("T")


class CallCancelledError(Exception):
    """Nobody wants the result of this call any more. Never reaches a user."""


class Call:
    """One call of a user: how long it may take, whether it is still wanted, and when it is at the user's memory."""

    def __init__(self, timeout: Timeout, default_seconds: float) -> None:
        """Raises ConfigError for a timeout that is not positive."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        # What was added to a deadline that the user left to this library.
        self._allowed_seconds = 0.0
        self._is_default = seconds is None
        self.seconds = default_seconds if seconds is None else float(seconds)
        if not self.seconds > 0:
            raise ConfigError(f"timeout {timeout} must be positive; leave it out for the default")
        self._at = time.monotonic() + self.seconds
        self._cancelled = threading.Event()
        self._memory = threading.Lock()
        self._streams: set[Any] = set()

    @property
    def left_seconds(self) -> float:
        """Raises what `check` raises."""
        self.check()
        return max(0.001, self._at - time.monotonic())

    def check(self) -> None:
        """Raises StoreTimeoutError after the deadline, CallCancelledError after `cancel`."""
        if self._cancelled.is_set():
            raise CallCancelledError
        if time.monotonic() >= self._at:
            raise StoreTimeoutError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the call was not done within its {self.seconds:g} s"
            )

    def cancel(self) -> None:
        """Ends the call as soon as it can be ended; from any thread."""
        self._cancelled.set()
        for stream in tuple(self._streams):
            stream.cancel()

    def allow(self, patience_seconds: float) -> None:
        """Lengthen a deadline that the user did not set to what it would be, had the daemon no patience, plus that: the
        daemon may make the call wait so long by itself."""
        if self._is_default and patience_seconds > self._allowed_seconds:
            more = patience_seconds - self._allowed_seconds
            self._allowed_seconds = patience_seconds
            self.seconds += more
            self._at += more

    def extend(self) -> None:
        """The whole time again. Raises CallCancelledError after `cancel`."""
        self._at = time.monotonic() + self.seconds
        self.check()

    def pause(self, seconds: float) -> None:
        """Waits, if there is time for it. Raises what `check` raises."""
        self._cancelled.wait(min(seconds, self.left_seconds))
        self.check()

    @contextlib.contextmanager
    def at_memory(self) -> Iterator[None]:
        """Around each use of tensors that the user gave: none begins after `cancel`. Raises what `check` raises."""
        with self._memory:
            self.check()
            yield

    def wait_for_memory(self) -> None:
        """To be called after `cancel`: returns when the user's tensors are not touched any more."""
        with self._memory:
            pass

    def track(self, stream: Any) -> Any:
        """A stream that has begun, which `cancel` ends from now on."""
        self._streams.add(stream)
        if not stream.add_callback(lambda: self._streams.discard(stream)):
            self._streams.discard(stream)
        if self._cancelled.is_set():
            stream.cancel()
        return stream


class _CancellableChannel:
    """A channel whose streams end when the call that they are a part of is cancelled."""

    def __init__(self, channel: grpc.Channel, call: Call) -> None:
        self._channel = channel
        self._call = call

    def stream_stream(self, method: str) -> Callable[..., Any]:
        begin: Any = self._channel.stream_stream(method)
        return lambda *arguments, **options: self._call.track(begin(*arguments, **options))


class Link:
    """One session with the daemon."""

    def __init__(self, channel: grpc.Channel, client: str, *, prefer_streams: bool) -> None:
        """Raises StoreError if the daemon does not welcome us."""
        self._stub: Any = pb_grpc.ParameterStoreStub(channel)
        self._channel = channel
        self._session = Session(self._stub, client)
        welcome = self._session.welcome
        self.session_id = welcome.session_id
        self.epoch = welcome.epoch
        self.arena_bytes = welcome.arena.size_bytes
        self.patience_seconds = patience_seconds(welcome)
        self.heartbeat_timeout_seconds = welcome.heartbeat_timeout_millis / 1000
        self._arena = None if prefer_streams else Arena.map(welcome.arena)

    @property
    def maps_memory(self) -> bool:
        """Whether bytes are copied through the mapped arena; else they are sent."""
        return self._arena is not None

    def goes_on(self, call: Call) -> bool:
        """Whether the session does; waits while a broken stream is being taken up again. Raises StoreTimeoutError."""
        try:
            self._session.wait_until_attached(call.left_seconds)
        except StoreTimeoutError:
            raise
        except StoreError:
            return False
        return True

    def is_known(self, call: Call) -> bool:
        """Whether the store knows the session: to tell what is not found from a session that has just ended."""
        try:
            self.call("ReleaseLeases", pb.ReleaseLeasesRequest(), call)
        except StoreError:
            return False
        return True

    def close(self) -> None:
        """Ends the session, and with it its leases and readers."""
        if self._arena is not None:
            # First: what this process could still write to is not used again until it has let go.
            self._arena.close()
        self._session.close()

    def copy_out(self, call: Call, lease: pb.Lease, target: torch.Tensor) -> None:
        """Copies the bytes of a read lease: from the mapped arena, or as a stream. Raises StoreError."""
        with call.at_memory():
            if self._arena is not None:
                target.copy_(self._arena.view(lease.arena_offset, lease.size_bytes))
                self._arena.check()
            else:
                source = pb.ReadRequest.Open(lease_id=lease.lease_id)
                self._streams(call).read(source, target.numpy().data, call.left_seconds)

    def copy_in(self, call: Call, lease: pb.Lease, source: torch.Tensor) -> None:
        """Fills a write lease with bytes that may be on a device, and zeros behind them. Raises StoreError."""
        with call.at_memory():
            if self._arena is not None:
                view = self._arena.view(lease.arena_offset, lease.size_bytes)
                view[: source.numel()] = source
                # Not somebody else's old bytes.
                view[source.numel() :] = 0
                self._arena.check()
            else:
                padding = lease.size_bytes - source.numel()
                padded = torch.nn.functional.pad(source, (0, padding)) if padding else source
                self._streams(call).write(lease.lease_id, padded.cpu().numpy().data, call.left_seconds)

    def _streams(self, call: Call) -> Streams:
        def check() -> None:
            call.check()
            self._session.check()

        channel: Any = _CancellableChannel(self._channel, call)
        return Streams(channel, self.session_id, check)

    def begin(self, method: str, request: Any, timeout_seconds: float) -> Any:
        """A unary call, as a future of grpc."""
        request.session_id = self.session_id
        future = self._invoke(getattr(self._stub, method).future, request, timeout=timeout_seconds)
        # grpc cancels a call whose future is forgotten, unless somebody waits for its end.
        future.add_done_callback(lambda _: None)
        return future

    def watch(self, job: str, call: Call) -> Any:
        """The responses of WatchJob, as grpc gives them."""
        request = pb.WatchJobRequest(session_id=self.session_id, job=job)
        return call.track(self._invoke(self._stub.WatchJob, request))

    def _invoke(self, method: Any, request: Any, **options: Any) -> Any:
        try:
            return method(request, **options)
        except ValueError as error:
            # What grpc says of a channel that was closed.
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the client was closed") from error

    def call(self, method: str, request: Any, call: Call) -> Any:
        """A unary call. Raises StoreError."""
        call.allow(self.patience_seconds)
        return result_of(self.begin(method, request, call.left_seconds))


class Connection:
    """A channel and, on it, one session that is always there again."""

    def __init__(self, address: str, client: str, credentials: Credentials, *, prefer_streams: bool) -> None:
        """Connects when it is first used. Raises ConfigError for what is no address, and for unusable credentials."""
        self.address = address
        self._client = client
        self._prefer_streams = prefer_streams
        self._channel = open_channel(address, credentials)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False

    def close(self) -> None:
        """Ends the session."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()
        self._channel.close()

    def new_link(self) -> Link:
        """A session apart, which is the caller's to close. Raises StoreError."""
        if self._closed:
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, f"the client of {self.address} was closed")
        return Link(self._channel, self._client, prefer_streams=self._prefer_streams)

    def link(self, call: Call) -> Link:
        """The session, opened again if it has ended. Raises StoreError."""
        link = self._link
        if link is not None and link.goes_on(call):
            return link
        with self._lock:
            # Unless another call has opened it again meanwhile.
            if self._link is link:
                self._link = None
                if link is not None:
                    link.close()
            if self._link is None:
                self._link = self.new_link()
            return self._link

    @property
    def epoch(self) -> str:
        """Of the daemon's start, in the session that was opened last."""
        return "" if self._link is None else self._link.epoch

    @property
    def maps_memory(self) -> bool:
        """Whether bytes go through the mapped arena, in the session that was opened last."""
        return self._link is not None and self._link.maps_memory

    def resume(self, call: Call, attempt: Callable[[Link], T]) -> T:
        """What `attempt` gives; after a break of the connection it is made again, on a new session if need be.

        Raises:
            StoreError: the store refuses, or the deadline has passed.
        """
        return resume(call, lambda: self.link(call), attempt)


def resume(call: Call, link_of: Callable[[], Link], attempt: Callable[[Link], T]) -> T:
    """See Connection.resume; `link_of` gives the session to use now."""
    backoff = Backoff()
    while True:
        call.check()
        link: Link | None = None
        try:
            link = link_of()
            return attempt(link)
        except (StoreUnavailableError, StoreNotFoundError) as error:
            # Of a session that has ended everything is unknown.
            if isinstance(error, StoreNotFoundError) and (link is None or link.is_known(call)):
                raise
            failure = error
        try:
            call.pause(backoff.next_seconds())
        except StoreTimeoutError:
            # Why, rather than that.
            raise failure from None


def result_of(future: Any) -> Any:
    """The response of a call that was begun. Raises StoreError."""
    try:
        return future.result()
    except grpc.RpcError as error:
        raise translate(error) from error
    except grpc.FutureCancelledError as error:
        raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the call was cancelled") from error


def release(link: Link, lease_ids: list[int]) -> None:
    """Returns leases, without waiting. What fails has ended with the session."""
    releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease_id) for lease_id in lease_ids]
    with contextlib.suppress(StoreUnavailableError):
        link.begin("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases), CONTROL_DEADLINE_SECONDS)
