"""The way to the daemon: addresses, channels, deadlines, and the one place where gRPC errors become ours.

Owns no state. Must never retry a call that could have been executed: the caller knows what a repetition means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.contract.address import ADDRESS_VARIABLE, is_socket, socket_path
from paramserver.contract.answered import is_answer
from paramserver.contract.limits import MAX_FRAME_BYTES
from paramserver.contract.printable import printable
from paramserver.contract.sockets import with_real_paths
from trainer_client.errors import (
    ConfigError,
    DataLossError,
    InvalidRequestError,
    JobConflictError,
    PermissionDeniedError,
    StepAbortedError,
    StoreBudgetError,
    StoreError,
    StoreNotFoundError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnauthenticatedError,
)
from trainer_client.transport.credentials import NO_CREDENTIALS, Credentials

SERVICE_NAME = "paramserver.v1.ParameterStore"

# Control calls answer from memory. Leases wait for bytes, budget and updates; commits wait for the slowest rank.
CONTROL_DEADLINE_SECONDS = 30.0
LEASE_DEADLINE_SECONDS = 300.0
COMMIT_DEADLINE_SECONDS = 900.0

_OPTIONS = (
    # A daemon that has just been started serves within a second; grpc's default waits as long before it looks again.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # How long one attempt to connect may take, whatever the name says: over a slow network, several round trips.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.http2.max_frame_size", MAX_FRAME_BYTES),
    # A daemon whose machine or network has gone without a word is noticed within 13 s, before it gives our session up
    # (15 s). No ping is sent while anything comes in: heartbeats are answered each second or two. The time-out is also
    # how long the kernel waits for what it has sent to be acknowledged.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    # Of gRPC's pings for other ends, with which a sign of life is not asked for once more: a minute by default.
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_ERRORS: dict[grpc.StatusCode, type[StoreError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: StoreNotFoundError,
    grpc.StatusCode.UNAVAILABLE: StoreUnavailableError,
    grpc.StatusCode.CANCELLED: StoreUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: StoreTimeoutError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StoreBudgetError,
    grpc.StatusCode.FAILED_PRECONDITION: JobConflictError,
    grpc.StatusCode.ALREADY_EXISTS: JobConflictError,
    grpc.StatusCode.ABORTED: StepAbortedError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
}

T = TypeVar("T")


def check_address(address: str) -> str:
    """A gRPC target for `unix:/path/to.sock` or `host:port`.

    Raises:
        ConfigError: it is neither, or no socket can be at the path.
    """
    if is_socket(address):
        try:
            socket_path(address)
        except ValueError as error:
            raise ConfigError(f"store address {address!r}: {error}") from error
        return address
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"store address {address!r}: write 'unix:/path/paramserver.sock' or 'host:port'")
    return address


def open_channel(address: str, credentials: Credentials = NO_CREDENTIALS) -> grpc.Channel:
    """A channel to the daemon; connects on first use.

    Raises:
        ConfigError: the address is none, a file of the credentials cannot be used, or a token would cross the network
            in the clear.
        StoreUnavailableError: the socket's path is long, and its directory is not there.
    """
    return credentials.connect(check_address(address), _OPTIONS)


def is_serving(channel: grpc.Channel, timeout_seconds: float) -> bool:
    """Whether the daemon answers SERVING for the parameter store."""
    return _why_not_serving(channel, timeout_seconds) is None


def _why_not_serving(channel: grpc.Channel, timeout_seconds: float) -> str | None:
    health = health_pb2_grpc.HealthStub(channel)
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=timeout_seconds)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return printable(with_real_paths(error.details() or str(error.code())))
    return None if answer.status == health_pb2.HealthCheckResponse.SERVING else "it is not ready"


def wait_until_serving(address: str, timeout_seconds: float, credentials: Credentials = NO_CREDENTIALS) -> None:
    """Returns when the daemon serves.

    Raises:
        ConfigError: see `open_channel`.
        StoreUnavailableError: it did not within the time.
    """
    deadline = time.monotonic() + timeout_seconds
    with ExitStack() as cleanup:
        channel: grpc.Channel | None = None
        while True:
            try:
                channel = channel or cleanup.enter_context(open_channel(address, credentials))
                reason = _why_not_serving(channel, timeout_seconds=min(1.0, timeout_seconds))
            except StoreUnavailableError as error:
                reason = error.message
            if reason is None:
                return
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"no store daemon serves at {address} (waited {timeout_seconds:g} s; {reason}): start one with "
                    f"`paramserver serve`, or correct paramserver.address or ${ADDRESS_VARIABLE}; where it has "
                    "tls_certificate set, set paramserver.tls",
                )
            time.sleep(0.05)


def translate(error: grpc.RpcError) -> StoreError:
    """Our error for a failed call."""
    # Every RpcError that grpc raises or keeps in a future is also a grpc.Call.
    assert isinstance(error, grpc.Call)
    code = error.code() or grpc.StatusCode.UNKNOWN
    reason = printable(with_real_paths(error.details() or "no reason given"))
    if code is grpc.StatusCode.UNAVAILABLE and not is_answer(error.trailing_metadata()):
        reason = (
            f"the store daemon cannot be reached any more ({reason}): look at its log, then restart the job; "
            "it resumes from the last commit"
        )
    return _ERRORS.get(code, StoreError)(code, reason)


def _ignore(response: Any, began: float, ended: float) -> None:
    """Nobody wants to know how long it was waited for."""


class Pending(Generic[T]):
    """A call under way: `wait` gives its result, as often as it is asked.

    Attributes:
        waited_seconds: that the last `wait` took, less what its thread computed: to unpack what came is no wait.
    """

    def __init__(
        self,
        future: Any,
        finish: Callable[[Any], T],
        waited: Callable[[Any, float, float], None] = _ignore,
        give_back: Callable[[Any], None] | None = None,
    ) -> None:
        """`waited` is told the response and from when to when it was waited for, in seconds of time.monotonic(): for
        `waited_seconds`. `give_back` gets the response and returns to the store what the call was granted."""
        self.waited_seconds = 0.0
        self._give_back = give_back
        self._future = future
        self._finish = finish
        self._waited = waited

    def wait(self) -> T:
        """Wait for the result. Where this fails, for whatever reason, the caller gets nothing and has nothing to
        return, because what the call was granted, or will be, goes back to the store.

        Raises:
            StoreError: the call failed.
        """
        try:
            return self._wait()
        except BaseException:
            self.forgo()
            raise

    def forgo(self) -> None:
        """Give back what the call is granted, as soon as the store has granted it, for a caller that has not waited for
        it and does not want it any more. Does not wait. A refusal is not reported, because the caller wants nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self.on_response(give_back)

    def _wait(self) -> T:
        began, computed = time.monotonic(), time.thread_time()
        try:
            response = self._future.result()
        except grpc.RpcError as error:
            raise translate(error) from error
        except grpc.FutureCancelledError as error:
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed") from error
        result = self._finish(response)
        self.waited_seconds = max(0.0, time.monotonic() - began - (time.thread_time() - computed))
        self._waited(response, began, began + self.waited_seconds)
        return result

    def on_response(self, act: Callable[[Any], None]) -> None:
        """Has `act` called with the response itself once it is there, on any thread; never, if the call fails."""

        def act_on_success(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                act(future.result())

        self._future.add_done_callback(act_on_success)
