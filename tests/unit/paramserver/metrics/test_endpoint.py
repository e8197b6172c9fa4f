"""The HTTP endpoint gives up clients that keep its threads from other ones."""

from __future__ import annotations

import socket
import time
import urllib.request
from contextlib import ExitStack, suppress

import pytest
from prometheus_client import CollectorRegistry

from paramserver.metrics import endpoint
from paramserver.metrics.endpoint import MOST_REQUESTS, MetricsEndpoint
from paramserver.security.gate import Gate


def test_clients_that_send_a_byte_now_and_then_are_cut_off_and_others_are_served_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A byte within each time-out of a read would keep a thread until the client ends, and there are few threads."""
    monkeypatch.setattr(endpoint, "_REQUEST_SECONDS", 1.0)
    served = MetricsEndpoint("127.0.0.1:0", CollectorRegistry(), Gate(None), None, None)
    with ExitStack() as cleanup:
        cleanup.callback(served.close)
        host, _, port = served.address.partition(":")
        slow = [
            cleanup.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(MOST_REQUESTS)
        ]
        open_ones = list(slow)
        deadline = time.monotonic() + 30
        while open_ones and time.monotonic() < deadline:
            for connection in list(open_ones):
                try:
                    connection.sendall(b"G")
                except OSError:
                    open_ones.remove(connection)
            time.sleep(0.1)
        assert not open_ones, "a slow client keeps its thread"
        answered = False
        while not answered and time.monotonic() < deadline:
            # A thread is free a moment after its client has seen the end.
            with suppress(OSError), urllib.request.urlopen(f"http://{served.address}/metrics", timeout=10) as answer:
                answered = answer.status == 200
        assert answered
