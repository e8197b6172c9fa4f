"""The thread that begins calls, at its end."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from tests.integration.support.waiting import wait_until
from trainer_client.transport.sender import Sender


class Slow:
    """A method whose first call takes long to begin, until `go` is set."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def future(self, request: Any, timeout: float) -> Future[Any]:
        self.begun.set()
        assert self.go.wait(10)
        answered: Future[Any] = Future()
        answered.set_result(request)
        return answered


def test_each_call_is_answered_although_the_thread_is_about_to_end() -> None:
    sender, method = Sender(), Slow()
    first = sender.begin(method, "first", 1.0)
    assert method.begun.wait(10)
    second = sender.begin(method, "second", 1.0)
    closing = threading.Thread(target=sender.close)
    closing.start()
    # The end is queued behind the second call.
    wait_until(lambda: sender._waiting.qsize() == 2)
    late = sender.begin(method, "late", 1.0)
    method.go.set()

    assert [first.result(10), second.result(10)] == ["first", "second"]
    with pytest.raises(grpc.FutureCancelledError):
        late.result(10)
    closing.join()
    sender.close()
    with pytest.raises(grpc.FutureCancelledError):
        sender.begin(method, "later", 1.0).result(10)


class Broken:
    """A method whose calls cannot begin, or whose begun calls have failed without an answer of gRPC."""

    def __init__(self, *, begins: bool) -> None:
        self._begins = begins

    def future(self, request: Any, timeout: float) -> Future[Any]:
        if not self._begins:
            raise RuntimeError("can't start new thread")
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("can't start new thread"))
        return failed


@pytest.mark.parametrize("begins", [False, True])
def test_a_call_that_fails_in_an_unforeseen_way_is_answered_and_so_is_the_next(begins: bool) -> None:
    sender, method = Sender(), Slow()
    method.go.set()
    broken = sender.begin(Broken(begins=begins), "first", 1.0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        broken.result(10)
    assert sender.begin(method, "second", 1.0).result(10) == "second"
    sender.close()
