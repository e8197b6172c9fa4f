"""A session that is resumed with a daemon which was restarted, or which has ended the session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.contract.answered import with_epoch
from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1.parameter_store_pb2_grpc import (
    ParameterStoreServicer,
    ParameterStoreStub,
    add_ParameterStoreServicer_to_server,
)
from trainer_client.client.transport.session import Session
from trainer_client.errors import DaemonRestartedError, SessionEndedError, StoreError, StoreUnavailableError

# The status, text and trailing metadata with which a stream ends.
Ending = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
LOST: Ending = grpc.StatusCode.UNAVAILABLE, "Socket closed", ()


def unknown(*metadata: tuple[str, str]) -> Ending:
    return grpc.StatusCode.NOT_FOUND, "no such session", metadata


def welcome(epoch: str) -> pb.SessionResponse:
    return pb.SessionResponse(
        welcome=pb.SessionResponse.Welcome(
            session_id="first", epoch=epoch, heartbeat_interval_millis=1000, grace_millis=5000
        )
    )


class Daemons(ParameterStoreServicer):
    """What the daemons at one address answer to each hello, in order: a Welcome, or the end of the stream.

    Attributes:
        breaks: when it is set, the stream of the first Welcome breaks, as if its daemon had been killed.
    """

    def __init__(self, *answers: pb.SessionResponse | Ending) -> None:
        self._answers = iter(answers)
        self.hellos: list[pb.SessionRequest.Hello] = []
        self.breaks = threading.Event()

    def Session(self, requests: Iterator[pb.SessionRequest], context: Any) -> Iterator[pb.SessionResponse]:  # noqa: N802
        self.hellos.append(next(requests).hello)
        answer = next(self._answers)
        if isinstance(answer, pb.SessionResponse):
            yield answer
            assert self.breaks.wait(10)
            answer = LOST
        code, text, metadata = answer
        context.set_trailing_metadata(metadata)
        context.abort(code, text)


def failure_of(directory: Path, daemons: Daemons) -> StoreError:
    """Open a session, break it, and return the error with which it ends."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_ParameterStoreServicer_to_server(daemons, server)
    address = f"unix:{directory}/daemon.sock"
    server.add_insecure_port(address)
    server.start()
    lost = threading.Event()
    failures: list[StoreError] = []

    def note(error: StoreError) -> None:
        failures.append(error)
        lost.set()

    try:
        with (
            channel_to(address) as channel,
            closing(
                Session(
                    ParameterStoreStub(channel),
                    "test",
                    registers_arena=False,
                    on_lost=note,
                )
            ),
        ):
            daemons.breaks.set()
            assert lost.wait(10)
    finally:
        server.stop(None).wait()
    return failures[0]


def test_the_answer_of_a_restarted_daemon_is_enough(tmp_path: Path) -> None:
    """The client opens no session to ask for the epoch, so a daemon without a free seat can answer, too."""
    daemons = Daemons(welcome("one"), unknown(*with_epoch("two")))

    assert isinstance(failure_of(tmp_path, daemons), DaemonRestartedError)
    assert [hello.session_id for hello in daemons.hellos] == ["", "first"]


def test_a_daemon_that_is_lost_before_it_answers_is_no_end_of_the_session(tmp_path: Path) -> None:
    """The second daemon is killed before it answers, so the client asks the third one."""
    daemons = Daemons(welcome("one"), LOST, unknown(*with_epoch("three")))

    assert isinstance(failure_of(tmp_path, daemons), DaemonRestartedError)
    assert [hello.session_id for hello in daemons.hellos] == ["", "first", "first"]


@pytest.mark.parametrize("answer", [unknown(*with_epoch("one")), unknown()], ids=["same-epoch", "no-epoch"])
def test_a_daemon_that_has_ended_the_session_is_believed(tmp_path: Path, answer: Ending) -> None:
    daemons = Daemons(welcome("one"), answer)

    assert isinstance(failure_of(tmp_path, daemons), SessionEndedError)
    assert len(daemons.hellos) == 2


def test_a_session_that_this_process_cannot_resume_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started, as where a process has all that its user may have."""

    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    failure = failure_of(tmp_path, Daemons(welcome("one"), LOST))

    assert isinstance(failure, StoreUnavailableError) and "can't start new thread" in failure.message
