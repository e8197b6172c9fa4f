"""Addresses are checked before a client connects, and the error for an unreachable daemon names it and the remedy."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from paramserver.contract.sockets import MAX_NAME_BYTES
from trainer_client.client.transport.channel import Pending, check_address, wait_until_serving
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import ConfigError, StoreUnavailableError


@pytest.mark.parametrize("address", ["unix:/run/p/paramserver.sock", "localhost:50051", "[::1]:50051"])
def test_good_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":50051", "host:port", "host:0", "host:65536", "host:\N{SUPERSCRIPT TWO}", "unix:relative"],
)
def test_bad_addresses_are_refused_with_their_text(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_address(address)

    assert repr(address) in str(caught.value)


def test_a_path_of_any_length_is_an_address_unless_its_last_part_is_too_long() -> None:
    deep = "unix:/" + "/".join(["d" * 200] * 5)
    assert check_address(f"{deep}/paramserver.sock") == f"{deep}/paramserver.sock"
    with pytest.raises(ConfigError, match=f"its last part may have {MAX_NAME_BYTES} bytes"):
        check_address(f"{deep}/{'s' * 107}")


def test_a_directory_that_is_not_there_is_waited_for_whatever_its_length(tmp_path: Path) -> None:
    for state_dir in (tmp_path / "short", tmp_path / ("d" * 200) / ("e" * 200)):
        with pytest.raises(StoreUnavailableError, match=f"no store daemon serves at unix:{state_dir}/s .waited 0.2 s"):
            wait_until_serving(f"unix:{state_dir}/s", timeout_seconds=0.2)


def test_an_unreachable_daemon_is_named_by_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 200)
    directory.mkdir()
    with pytest.raises(StoreUnavailableError) as caught:
        RankStore(f"unix:{directory}/none.sock", "test")
    assert f"unix:{directory}/none.sock" in str(caught.value) and "/proc/self" not in str(caught.value)


def test_an_unreachable_daemon_is_named_with_the_remedy(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/none.sock"

    with pytest.raises(StoreUnavailableError, match="paramserver serve"):
        wait_until_serving(address, timeout_seconds=0.1)
    with pytest.raises(StoreUnavailableError):
        RankStore(address, "test")


def test_what_the_thread_computes_while_it_waits_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes after 3 s, and unpacking takes 5 s, of which the thread computes 4 s: the wait lasted 4 s."""
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
