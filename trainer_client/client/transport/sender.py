"""A thread that begins gRPC calls for the other threads of the process, and begins those again whose connection broke.

To begin a call costs gRPC 0.3 ms of processor time (measured), and gRPC releases Python's lock meanwhile. With a thread
for this, the caller can copy leased bytes in that time. This module owns the thread, the order in which calls begin,
and their numbers. It must never wait for the end of a call.

[Note: calls that were lost] If a connection breaks, the client does not know which of its calls the store has made. A
store with the capability `repeated-calls` executes the call of each number only once
(paramserver/contract/repeated_calls.py). So when the session is resumed, the thread begins the calls without an answer
again, in their order, and only then the calls that it was given meanwhile. Callers notice only that their calls took
longer. If the session has ended instead, the lost calls fail with the errors that gRPC gave them.
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

# The pause of the sender's thread between two looks at whether lost calls can be begun again.
_LOOK_SECONDS = 0.02
# The longest time between the failure of a call and the break of the session's stream, if both have the same cause.
# After this time, a lost call is begun again even if the session's stream has not broken.
_SHOWS_SECONDS = 2.0


class RepeatingSession(Protocol):
    """The attributes of a session (session.py) from which a Sender learns whether it can begin calls again."""

    @property
    def stream_number(self) -> int:
        """The number of the newest stream on which the session was welcomed."""

    @property
    def is_attached(self) -> bool:
        """Whether calls of the session can be made now: its stream is not broken, and the session has not ended."""

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, so that none of its calls can succeed any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class _QueuedCall:
    """A call that the Sender was given, from `begin` until its answer arrives or it fails.

    Attributes:
        number: the call's place in the order of all calls, which is also its number for the store.
        has_session: whether it is a call of the session, so that the store executes its number only once.
        response: the future that the caller has.
        stream: the number of the session's stream at the time when the call was begun last.
        answered: the numbers of earlier calls of which this call tells the store that their answers have arrived.
        failure: the error with which the call was lost; None if it is queued or under way.
        failed_at: the time at which the call was lost, in seconds of time.monotonic().
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
        session: the session whose lost calls are begun again; None: no call is begun again.
    """

    def __init__(self, session: RepeatingSession | None = None) -> None:
        self._session = session
        self._process = OwnProcess()
        # The lock guards the queue and `_is_closed` together, because a call that is queued after the thread's end
        # would never begin, and its caller would wait forever. The lock is reentrant because a signal handler may close
        # the session while its thread begins a call. No future gets its result under the lock, because the future's
        # callbacks take other locks.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[_QueuedCall] = deque()
        self._is_closed = False
        self._number = 0
        # The calls that were begun and have no answer, by number; those of them that were lost; and the numbers of the
        # calls whose answers have arrived, which a later call reports to the store.
        self._begun: dict[int, _QueuedCall] = {}
        self._lost: dict[int, _QueuedCall] = {}
        self._answered: list[int] = []
        self._thread = threading.Thread(target=self._run, name="paramserver-sender", daemon=True)
        self._thread.start()

    def begin(self, method: Any, request: Any, timeout_seconds: float, *, has_session: bool = True) -> Future[Any]:
        """Queue a call and return its future, which fails with grpc.RpcError, or FutureCancelledError after `close`.

        `has_session` is False for a request that names no session. Such a call must be idempotent, because the store
        may make it more than once. In a forked child, this raises ForkedChildError, because no thread would begin the
        call.
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

        The calls are variables of this method, so that the thread keeps none while it waits for the next one. Their
        callbacks may refer to an engine that the program no longer uses, which a kept call would keep alive.
        """
        ready, failed = self._next()
        for call in failed:
            call.response.set_exception(call.failure)
        for call in ready:
            self._begin(call)
        return bool(ready or failed)

    def _next(self) -> tuple[Sequence[_QueuedCall], Sequence[_QueuedCall]]:
        """Wait until there are calls to begin, or lost calls that can never be begun again, and return both lists.

        After `close`, both are empty when no call is left.
        """
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
        # gRPC reports the lost calls of a broken connection one after the other. So no lost call is begun again before
        # all of them are reported, because they must be begun in their order.
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
            # gRPC raises ValueError for a call on a closed channel, so the call's future gets the error of a closed
            # sender.
            self._end(call, None, grpc.FutureCancelledError())
        except Exception as error:
            # Beginning a call can also fail with other errors, for example if gRPC can start no thread. The call's
            # future gets the error.
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
        """Return whether `error` means that the connection broke before the answer to `call` came.

        If so, keep the call, to begin it again when the session is resumed.
        """
        if not isinstance(error, grpc.RpcError) or self._session is None:
            return False
        # Every RpcError that grpc raises or keeps in a future is also a grpc.Call, which has the status code.
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
