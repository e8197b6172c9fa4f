"""gRPC channels to the daemon: addresses, options, default deadlines, and the translation of gRPC's errors.

This module owns no state. It must never retry a call that the daemon may have executed, because only the caller knows
whether it may be repeated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.contract.address import ADDRESS_VARIABLE, check_daemon
from paramserver.contract.answered import is_about_a_device, is_about_the_model, is_answer
from paramserver.contract.bearer import TraceParent
from paramserver.contract.limits import MAX_FRAME_BYTES
from paramserver.contract.printable import printable
from paramserver.contract.silence import ANSWER_SECONDS, PING_SECONDS
from paramserver.contract.sockets import with_real_paths
from trainer_client.client.transport.credentials import NO_CREDENTIALS, TOKEN_FILE_VARIABLE, Credentials
from trainer_client.errors import (
    ConfigError,
    DataLossError,
    InvalidRequestError,
    JobConflictError,
    OtherModelError,
    PermissionDeniedError,
    StepAbortedError,
    StoreBudgetError,
    StoreDeviceError,
    StoreError,
    StoreNotFoundError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnauthenticatedError,
)

log = logging.getLogger(__name__)

SERVICE_NAME = "paramserver.v1.ParameterStore"

# The default deadlines of calls. The daemon answers control calls from memory, so their deadline is short. A lease
# request waits for bytes, budget and updates, and a commit waits for the slowest rank, so their deadlines are longer.
CONTROL_DEADLINE_SECONDS = 30.0
LEASE_DEADLINE_SECONDS = 300.0
COMMIT_DEADLINE_SECONDS = 900.0
# The seconds between two calls of the function that `Pending.while_late` was given.
_LATE_SECONDS = 1.0

_OPTIONS = (
    # The first pause between two attempts to connect. It is short, because a daemon that has been started serves within
    # a second, and grpc's default is a pause of one second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name, `min_reconnect_backoff_ms` is the time-out of one attempt to connect, which takes several round
    # trips.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.http2.max_frame_size", MAX_FRAME_BYTES),
    # With keepalive_time_ms and keepalive_timeout_ms, the client notices within 13 s that the daemon's machine or
    # network has failed silently, before the daemon ends the silent session after 15 s. gRPC sends no ping while bytes
    # arrive, and heartbeats are answered every second or two. The time-out of keepalive pings is also the kernel's
    # time-out for sent bytes to be acknowledged.
    ("grpc.keepalive_time_ms", 1000 * PING_SECONDS),
    ("grpc.keepalive_timeout_ms", 1000 * ANSWER_SECONDS),
    # gRPC also sends pings for other purposes, and sends no keepalive ping while one of them is unanswered. Without
    # ping_timeout_ms, gRPC would wait a minute for the answer to such a ping.
    ("grpc.http2.ping_timeout_ms", 1000 * ANSWER_SECONDS),
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
    """Return `address`, which is a gRPC target already, after checking that it is `unix:/path/to.sock` or `host:port`.

    Raises:
        ConfigError: the address has neither form, or the path cannot be that of a socket.
    """
    try:
        return check_daemon(address)
    except ValueError as error:
        raise ConfigError(f"store address {address!r}: {error}") from None


def open_channel(
    address: str, credentials: Credentials = NO_CREDENTIALS, trace: TraceParent | None = None
) -> grpc.Channel:
    """Return a channel to the daemon, which connects on first use. `trace` adds the caller's span to its calls.

    Raises:
        ConfigError: the address is malformed, a file of the credentials cannot be used, or a token would cross the
            network unencrypted.
        StoreUnavailableError: the socket's path is too long for the kernel, and its directory does not exist.
    """
    return credentials.connect(check_address(address), _OPTIONS, trace)


def is_serving(channel: grpc.Channel, timeout_seconds: float) -> bool:
    """Return whether the daemon's health service answers SERVING for the parameter store."""
    return _why_not_serving(channel, timeout_seconds) is None


def _why_not_serving(channel: grpc.Channel, timeout_seconds: float) -> str | None:
    health = health_pb2_grpc.HealthStub(channel)
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=timeout_seconds)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return printable(with_real_paths(error.details() or str(error.code())))
    return None if answer.status == health_pb2.HealthCheckResponse.SERVING else "it is not ready"


def wait_until_serving(
    address: str, timeout_seconds: float, credentials: Credentials = NO_CREDENTIALS, *, is_loud: bool = False
) -> None:
    """Wait until the daemon serves. With `is_loud`, log a warning if it does not serve at once.

    Raises:
        ConfigError: see `open_channel`.
        StoreUnavailableError: the daemon did not serve within `timeout_seconds`.
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
            if is_loud:
                # The line that this rank waits for the daemon is a warning, because Python prints warnings even if the
                # user has configured no logging.
                log.warning("paramserver: %s", waiting_line(address, timeout_seconds))
                is_loud = False
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"no store daemon serves at {address} (waited {timeout_seconds:g} s; {reason}): start one with "
                    f"`paramserver serve`, or correct paramserver.address or ${ADDRESS_VARIABLE}; where it has "
                    "tls_certificate set, set paramserver.tls",
                )
            time.sleep(0.05)


def waiting_line(address: str, timeout_seconds: float) -> str:
    """Return the line for the log that says that this process waits for a daemon at `address`, and how long."""
    return f"waiting up to {timeout_seconds:.0f} s for the store daemon at {address}, which does not answer"


def translate(error: grpc.RpcError) -> StoreError:
    """Return the StoreError for a failed gRPC call."""
    # Every RpcError that grpc raises or keeps in a future is also a grpc.Call, which has the status code.
    assert isinstance(error, grpc.Call)
    code = error.code() or grpc.StatusCode.UNKNOWN
    reason = printable(with_real_paths(error.details() or "no reason given"))
    if code is grpc.StatusCode.UNAVAILABLE and not is_answer(error.trailing_metadata()):
        reason = (
            f"the store daemon cannot be reached any more ({reason}): look at its log, then restart the job; "
            "it resumes from the last commit"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        reason = (
            f"{reason}: the token was not given, is not in the daemon's token_file (any more), or has expired "
            "(`paramserver tokens list` shows); write one that counts to the file of paramserver.token_file or "
            f"${TOKEN_FILE_VARIABLE}, and start the job again"
        )
    marks = error.trailing_metadata()
    kind = _ERRORS.get(code, StoreError)
    if is_about_the_model(marks):
        kind = OtherModelError
    elif is_about_a_device(marks):
        kind = StoreDeviceError
    return kind(code, reason)


def _ignore(response: Any, began: float, ended: float) -> None:
    """Do nothing; the default of `Pending` for calls whose wait is not recorded."""


class Pending(Generic[T]):
    """The future of a call to the store; `wait` returns the call's result and may be called again.

    Attributes:
        waited_seconds: duration of the last `wait`, less the processor time that its thread used meanwhile, because
            unpacking the response is work and not waiting.
    """

    def __init__(
        self,
        future: Any,
        finish: Callable[[Any], T],
        waited: Callable[[Any, float, float], None] = _ignore,
        release: Callable[[Any], None] | None = None,
    ) -> None:
        """Wrap the future of a call.

        Args:
            future: gives the response of the call.
            finish: makes the result from the response.
            waited: called after each successful `wait` with the response and with begin and end of the wait, which are
                `waited_seconds` apart, in seconds of time.monotonic().
            release: called with the response if the result is not wanted; releases what was granted.
        """
        self.waited_seconds = 0.0
        self._late: Callable[[], bool] | None = None
        self._release = release
        self._future = future
        self._finish = finish
        self._waited = waited

    @property
    def is_answered(self) -> bool:
        """Whether the call is answered, so that `wait` would return or raise at once."""
        return bool(self._future.done())

    @property
    def has_failed(self) -> bool:
        """Whether the call has failed, so that `wait` would raise at once."""
        return self.is_answered and (self._future.cancelled() or self._future.exception() is not None)

    def wait(self) -> T:
        """Wait for the result and return it.

        If this raises, the caller has nothing to release: what the call was granted, or will be granted, goes back to
        the store by itself.

        Raises:
            StoreError: the call failed.
        """
        try:
            return self._wait()
        except BaseException:
            self.release_when_granted()
            raise

    def release_when_granted(self) -> None:
        """Release what the call is granted, as soon as the store has granted it. It does not wait.

        A caller that has not waited for the result calls this when it does not need the result any more. If the store
        refuses the call, that is not reported.
        """
        release, self._release = self._release, None
        if release is not None:
            self.on_response(release)

    def when_answered(self, act: Callable[[], None]) -> None:
        """Call `act` when the call is answered, that is, when `wait` no longer has to wait. It may be called now.

        Any thread may call `act`.
        """
        self._future.add_done_callback(lambda _: act())

    def while_late(self, act: Callable[[], bool]) -> None:
        """Have `wait` call `act` each _LATE_SECONDS while the answer is missing, until `act` returns True."""
        self._late = act

    def _wait(self) -> T:
        began, computed = time.monotonic(), time.thread_time()
        if self._late is not None and not self.is_answered:
            answered = threading.Event()
            self.when_answered(answered.set)
            while not answered.wait(_LATE_SECONDS) and not self._late():
                pass
        try:
            response = self._future.result()
        except grpc.RpcError as error:
            raise translate(error) from None
        except grpc.FutureCancelledError:
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed") from None
        result = self._finish(response)
        self.waited_seconds = max(0.0, time.monotonic() - began - (time.thread_time() - computed))
        self._waited(response, began, began + self.waited_seconds)
        return result

    def on_response(self, act: Callable[[Any], None]) -> None:
        """Call `act` with the response when it arrives, on any thread. If the call fails, `act` is not called."""

        def act_on_success(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                act(future.result())

        self._future.add_done_callback(act_on_success)
