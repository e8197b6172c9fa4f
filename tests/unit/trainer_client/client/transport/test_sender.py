"""The thread that begins calls: at its end, and when the connection of calls breaks."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from paramserver.contract.answered import ANSWERED
from paramserver.contract.repeated_calls import CallMark
from tests.integration.support.waiting import wait_until
from trainer_client.client.transport.sender import Sender


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
    # The second call is queued, and no other one is let in any more.
    wait_until(lambda: sender._is_closed)
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


class LostError(grpc.RpcError):
    """The error of a call whose connection broke, or, with a mark, of one that the daemon has answered."""

    def __init__(self, *mark: tuple[str, str]) -> None:
        self._mark = mark

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def trailing_metadata(self) -> Any:
        return self._mark


# Every RpcError of grpc's is also a grpc.Call.
grpc.Call.register(LostError)


class Connection:
    """A session, and the method of its store; calls are under way until the test answers or breaks them."""

    def __init__(self) -> None:
        self.stream_number = 0
        self.is_attached = True
        self.is_over = False
        self.begun: list[tuple[str, CallMark | None]] = []
        self.under_way: list[Future[Any]] = []

    def future(self, request: str, timeout: float, metadata: Any = None) -> Future[Any]:
        self.begun.append((request, CallMark.of(metadata)))
        self.under_way.append(Future())
        return self.under_way[-1]

    def break_(self) -> None:
        """Break the connection: the last call is the first to fail."""
        self.is_attached = False
        broken, self.under_way = self.under_way, []
        for call in reversed(broken):
            call.set_exception(LostError())

    def resume(self) -> None:
        self.stream_number += 1
        self.is_attached = True

    def wait_for(self, count: int) -> list[tuple[str, int, int]]:
        """Wait until so many calls were begun, and return the requests with the numbers of call and stream."""
        wait_until(lambda: len(self.begun) >= count)
        return [(request, found.number, found.stream) for request, found in self.begun if found is not None]


def test_calls_whose_connection_broke_are_begun_again_in_their_order_before_later_ones() -> None:
    connection = Connection()
    sender = Sender(connection)
    responses = [sender.begin(connection, request, 1.0) for request in ("first", "second")]
    connection.wait_for(2)
    connection.break_()
    responses.append(sender.begin(connection, "third", 1.0))
    connection.resume()

    assert connection.wait_for(5)[2:] == [("first", 1, 1), ("second", 2, 1), ("third", 3, 1)]
    for number, call in enumerate(connection.under_way):
        call.set_result(number)
    connection.under_way.clear()
    assert [response.result(10) for response in responses] == [0, 1, 2]
    # The store hears which answers it need not keep, also if a call that told it so was lost.
    sender.begin(connection, "fourth", 1.0)
    connection.wait_for(6)
    connection.break_()
    connection.resume()
    connection.wait_for(7)
    marks = [found for _, found in connection.begun[5:] if found is not None]
    assert [sorted(found.answered) for found in marks] == [[1, 2, 3], [1, 2, 3]]
    sender.close()


def test_calls_that_were_lost_fail_when_their_session_has_ended_and_when_the_sender_ends() -> None:
    for ends in (True, False):
        connection = Connection()
        sender = Sender(connection)
        response = sender.begin(connection, "first", 1.0)
        connection.wait_for(1)
        connection.break_()
        if ends:
            connection.is_over = True
        else:
            sender.close()
        with pytest.raises(LostError):
            response.result(10)
        sender.close()


def test_an_answer_of_the_daemon_is_no_lost_call() -> None:
    connection = Connection()
    sender = Sender(connection)
    response = sender.begin(connection, "first", 1.0)
    connection.wait_for(1)
    connection.under_way[0].set_exception(LostError(*ANSWERED))
    with pytest.raises(LostError):
        response.result(10)
    assert len(connection.begun) == 1
    sender.close()
