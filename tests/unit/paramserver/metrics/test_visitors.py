"""Which connections of the HTTP endpoint stay open."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from paramserver.metrics import visitors as module
from paramserver.metrics.visitors import HttpVisitor, Visitors

SECONDS = 30.0


@pytest.fixture
def cleanup(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Few places and short times; closes at the end what a test has opened."""
    monkeypatch.setattr(module, "MOST_VISITORS", 4)
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.3)
    with ExitStack() as stack:
        yield stack


def arrive(visitors: Visitors, cleanup: ExitStack, host: str) -> HttpVisitor:
    """Have a visitor arrive, whose thread waits for bytes, as one of the endpoint does."""
    client, server = (cleanup.enter_context(end) for end in socket.socketpair())
    visitor = visitors.admit(server, host)

    client.settimeout(SECONDS)

    def serve() -> None:
        # The visitor may have had to give way before this thread began to wait.
        with suppress(OSError):
            server.recv(1)
        visitors.leave(visitor)

    thread = threading.Thread(target=serve)
    thread.start()
    cleanup.callback(thread.join)
    cleanup.callback(client.close)
    return visitor


def test_the_oldest_stranger_of_the_host_with_the_most_connections_gives_way(cleanup: ExitStack) -> None:
    visitors = Visitors()
    operator = arrive(visitors, cleanup, "10.0.0.1")
    crowd = [arrive(visitors, cleanup, "10.0.0.2") for _ in range(3)]
    crowd[0].be_known()
    began = time.monotonic()
    late = arrive(visitors, cleanup, "10.0.0.2")
    assert time.monotonic() - began >= 0.2, "each connection keeps its place for a while"
    assert [visitor.is_ended for visitor in (operator, *crowd)] == [False, False, True, False]
    crowd[2].be_known()
    # Two strangers are left, and that of the crowd gives way although the other one is older.
    arrive(visitors, cleanup, "10.0.0.3")
    assert [visitor.is_ended for visitor in (operator, crowd[0], crowd[2], late)] == [False, False, False, True]


def test_only_those_who_are_known_may_take_long_and_the_log_has_one_line(
    cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "KNOWN_WITHIN_SECONDS", 0.1)
    visitors = Visitors()
    known, *strangers = (arrive(visitors, cleanup, "10.0.0.1") for _ in range(3))
    known.be_known()
    time.sleep(0.2)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            visitors.look()
    assert not known.is_ended and all(stranger.is_ended for stranger in strangers)
    assert caplog.messages == ["metrics_listen: refused connections: 2 too slow; the last was from 10.0.0.1"]
