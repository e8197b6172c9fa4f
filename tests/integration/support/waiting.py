"""Waiting for an event in another process."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc


def wait_until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Wait until the condition holds; fail if it does not hold after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def succeed_at_last(call: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Make a call again and again until the daemon does not refuse it; raise the refusal after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            call()
            return
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
