"""A thread that begins gRPC calls for the other threads of the process.

To begin a call costs gRPC 0.3 ms of processor time (measured), and gRPC releases Python's lock meanwhile. With a thread
for this, the caller can copy leased bytes in that time. This module owns the thread and the order in which calls begin.
It must never wait for the end of a call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import grpc

from trainer_client.transport.own_process import OwnProcess


class Sender:
    """The thread that begins calls, in the order in which `begin` was called."""

    def __init__(self) -> None:
        self._process = OwnProcess()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A call behind the end of the queue would never begin, and its caller would wait for it without end. The lock
        # is reentrant because a signal handler may close the session while its thread begins a call.
        self._closing = threading.RLock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paramserver-sender", daemon=True)
        self._thread.start()

    def begin(self, method: Any, request: Any, timeout_seconds: float) -> Future[Any]:
        """Queue a call and return its future, which fails with grpc.RpcError, or FutureCancelledError after `close`.

        It raises ForkedChildError in a forked child, because nothing would begin the call there.
        """
        self._process.check()
        response: Future[Any] = Future()
        with self._closing:
            if not self._is_closed:
                self._waiting.put(partial(_begin, response, method, request, timeout_seconds))
                return response
        response.set_exception(grpc.FutureCancelledError())
        return response

    def close(self) -> None:
        """Begin the calls that are queued already and end the thread; idempotent."""
        with self._closing:
            self._is_closed = True
            self._waiting.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (begin := self._waiting.get()) is not None:
            begin()
            # While the thread waits for the next call, this one's future must not keep what its callbacks refer to,
            # which may be an engine that the program has forgotten.
            del begin


def _begin(response: Future[Any], method: Any, request: Any, timeout_seconds: float) -> None:
    try:
        call = method.future(request, timeout=timeout_seconds)
    except ValueError:
        # grpc raises ValueError if the channel is closed.
        response.set_exception(grpc.FutureCancelledError())
        return
    except Exception as error:
        # For example, no thread can be started.
        response.set_exception(error)
        return
    call.add_done_callback(partial(_copy_result, response))


def _copy_result(response: Future[Any], call: Any) -> None:
    try:
        response.set_result(call.result())
    except Exception as error:
        response.set_exception(error)
