"""A thread that begins gRPC calls for the other threads of the process, and begins those again whose connection broke.

To begin a call costs gRPC 0.3 ms of processor time (measured), and gRPC releases Python's lock meanwhile. With a thread
for this, the caller can copy leased bytes in that time. This module owns the thread, the order in which calls begin,
and their numbers. It must never wait for the end of a call.

[Note: calls that were lost] If a connection breaks, the client does not know which of its calls the store has made. A
store with the capability `repeated-calls` makes each number once (paramserver/contract/repeated_calls.py). So when the
session is resumed, the thread begins the calls without an answer again, in their order, and only then those that it was
given meanwhile. To their callers they only took longer. If the session has ended instead, they fail with the error that
they had.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from paramserver.contract.answered import is_answer
from paramserver.contract.repeated_calls import MOST_ANSWERED, CallMark
from trainer_client.client.transport.own_process import OwnProcess

# The thread looks this often whether lost calls can be begun again.
_LOOK_SECONDS = 0.02
# The longest time between the failure of a call and the break of the session's stream, if both are for the same reason.
# After it, the call is begun again on the stream that has not broken.
_SHOWS_SECONDS = 2.0


class RepeatingSession(Protocol):
    """The session whose calls are repeated; see session.py."""

    @property
    def stream_number(self) -> int:
        """The number of the newest stream on which the session was welcomed."""

    @property
    def is_attached(self) -> bool:
        """Whether calls can be made."""

    @property
    def is_over(self) -> bool:
        """Whether no call can succeed any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class _QueuedCall:
    """A call.

    Attributes:
        number: its place in the order of all calls, which is also its number for the store.
        has_session: whether it is a call of the session, so that the store makes its number once.
        response: the future that the caller has.
        stream: the session's stream when it was begun last.
        answered: the numbers of answers of which it tells the store.
        failure: why it was lost; None: it is under way.
        failed_at: when it was lost, in seconds of time.monotonic().
    """

    number: int
    method: Any
    request: Any
    timeout_seconds: float
    has_session: bool
    response: Future[Any]
    stream: int = 0
    answered: Sequence[int] = ()
    failure: Exception | None = None
    failed_at: float = 0.0


class Sender:
    """The thread that begins calls, in the order in which `begin` was called.

    Args:
        session: the session whose lost calls are begun again; None: no call is.
    """

    def __init__(self, session: RepeatingSession | None = None) -> None:
        self._session = session
        self._process = OwnProcess()
        # A call behind the end of the queue would never begin, and its caller would wait for it without end. The lock
        # is reentrant because a signal handler may close the session while its thread begins a call. No future gets its
        # result under the lock, because the future's callbacks take other locks.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[_QueuedCall] = deque()
        self._is_closed = False
        self._number = 0
        # The calls that were begun and have no answer, by number; those among them that were lost; and the numbers of
        # answers of which the store is to hear.
        self._begun: dict[int, _QueuedCall] = {}
        self._lost: dict[int, _QueuedCall] = {}
        self._answered: list[int] = []
        self._thread = threading.Thread(target=self._run, name="paramserver-sender", daemon=True)
        self._thread.start()

    def begin(self, method: Any, request: Any, timeout_seconds: float, *, has_session: bool = True) -> Future[Any]:
        """Queue a call and return its future, which fails with grpc.RpcError, or FutureCancelledError after `close`.

        `has_session` is False for a request that names no session. Such a call must be idempotent, because the store
        may make it more than once. It raises ForkedChildError in a forked child, because nothing would begin the call
        there.
        """
        self._process.check()
        response: Future[Any] = Future()
        with self._changed:
            if not self._is_closed:
                self._number += 1
                self._waiting.append(
                    _QueuedCall(
                        number=self._number,
                        method=method,
                        request=request,
                        timeout_seconds=timeout_seconds,
                        has_session=has_session,
                        response=response,
                    )
                )
                self._changed.notify_all()
                return response
        response.set_exception(grpc.FutureCancelledError())
        return response

    def close(self) -> None:
        """Begin the calls that are queued already and end the thread; idempotent. Calls that were lost fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self._make_next():
            pass

    def _make_next(self) -> bool:
        """Wait for calls, and begin them or end them. Return False after `close`, if there are none.

        The calls are variables of this method, so that the thread keeps none while it waits for the next one: their
        callbacks may refer to an engine that the program has forgotten.
        """
        ready, failed = self._next()
        for call in failed:
            call.response.set_exception(call.failure)
        for call in ready:
            self._begin(call)
        return bool(ready or failed)

    def _next(self) -> tuple[Sequence[_QueuedCall], Sequence[_QueuedCall]]:
        """Wait for calls that can be begun now, and for lost ones that never can. Return both; none after `close`."""
        with self._changed:
            while True:
                if self._lost:
                    is_over = self._is_closed or self._session is None or self._session.is_over
                    if is_over or self._can_repeat():
                        lost, self._lost = [self._lost[number] for number in sorted(self._lost)], {}
                        for call in lost:
                            del self._begun[call.number]
                        return ([], lost) if is_over else (lost, [])
                    self._changed.wait(_LOOK_SECONDS)
                elif self._waiting:
                    return [self._waiting.popleft()], []
                elif self._is_closed:
                    return [], []
                else:
                    self._changed.wait()

    def _can_repeat(self) -> bool:
        """Return whether the lost calls can be begun again, in their order and before any other call."""
        assert self._session is not None
        if not self._session.is_attached:
            return False
        stream, now = self._session.stream_number, time.monotonic()
        if now - max(call.failed_at for call in self._lost.values()) > _SHOWS_SECONDS:
            return True
        # All calls of a connection that broke are lost, but gRPC reports one after the other.
        are_all_known = all(call.stream == stream or call.failure is not None for call in self._begun.values())
        return are_all_known and all(call.stream < stream for call in self._lost.values())

    def _begin(self, call: _QueuedCall) -> None:
        call.failure = None
        options: dict[str, Any] = {"timeout": call.timeout_seconds}
        with self._changed:
            self._begun[call.number] = call
            if self._session is not None:
                call.stream = self._session.stream_number
                if call.has_session:
                    call.answered, self._answered = self._answered[:MOST_ANSWERED], self._answered[MOST_ANSWERED:]
                    mark = CallMark(stream=call.stream, number=call.number, answered=call.answered)
                    options["metadata"] = mark.to_metadata()
        try:
            begun = call.method.future(call.request, **options)
        except ValueError:
            # grpc raises ValueError if the channel is closed.
            self._end(call, None, grpc.FutureCancelledError())
        except Exception as error:
            # For example, no thread can be started.
            self._end(call, None, error)
        else:
            begun.add_done_callback(partial(self._on_answer, call))

    def _on_answer(self, call: _QueuedCall, begun: Any) -> None:
        try:
            result = begun.result()
        except Exception as error:
            if not self._is_lost(call, error):
                self._end(call, None, error)
        else:
            self._end(call, result, None)

    def _is_lost(self, call: _QueuedCall, error: Exception) -> bool:
        """Note a call whose connection broke before its answer came, and return True; return False for any other."""
        if not isinstance(error, grpc.RpcError) or self._session is None:
            return False
        # Every RpcError that grpc raises or keeps in a future is also a grpc.Call.
        assert isinstance(error, grpc.Call)
        if error.code() is not grpc.StatusCode.UNAVAILABLE or is_answer(error.trailing_metadata()):
            return False
        with self._changed:
            if self._is_closed or self._session.is_over:
                return False
            call.failure, call.failed_at = error, time.monotonic()
            self._lost[call.number] = call
            self._answered += call.answered
            self._changed.notify_all()
        return True

    def _end(self, call: _QueuedCall, result: Any, failure: Exception | None) -> None:
        with self._changed:
            del self._begun[call.number]
            if call.has_session and self._session is not None:
                self._answered.append(call.number)
        if failure is None:
            call.response.set_result(result)
        else:
            call.response.set_exception(failure)
