"""Addresses are checked before anything is tried, and an unreachable daemon is named with the remedy."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from trainer_client.errors import ConfigError, StoreUnavailableError
from trainer_client.link.channel import Pending, check_address, wait_until_serving
from trainer_client.link.rank_store import RankStore


@pytest.mark.parametrize("address", ["unix:/run/p/paramserver.sock", "localhost:50051", "[::1]:50051"])
def test_good_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["", "localhost", ":50051", "host:port", "host:0", "host:65536", "unix:relative"])
def test_bad_addresses_are_refused_with_their_text(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_address(address)

    assert repr(address) in str(caught.value)


def test_a_socket_path_that_the_system_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        check_address("unix:/" + "d" * 107)


def test_an_unreachable_daemon_is_named_with_the_remedy(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/none.sock"

    with pytest.raises(StoreUnavailableError, match="paramserver serve"):
        wait_until_serving(address, timeout_seconds=0.1)
    with pytest.raises(StoreUnavailableError):
        RankStore(address, "test")


def test_what_the_thread_computes_while_it_waits_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 s until the answer comes, and 5 s to unpack it, 4 of them on the processor."""
    now = {"monotonic": 100.0, "thread_time": 7.0}
    monkeypatch.setattr(time, "monotonic", lambda: now["monotonic"])
    monkeypatch.setattr(time, "thread_time", lambda: now["thread_time"])

    class Answer(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            now["monotonic"] += 3.0
            return "answer"

    def unpack(answer: Any) -> str:
        now["monotonic"] += 5.0
        now["thread_time"] += 4.0
        return f"unpacked {answer}"

    waits: list[tuple[Any, float, float]] = []
    pending = Pending(Answer(), unpack, lambda *wait: waits.append(wait))
    assert pending.waited_seconds == 0.0
    assert pending.wait() == "unpacked answer"
    assert pending.waited_seconds == 4.0
    assert waits == [("answer", 100.0, 104.0)]
