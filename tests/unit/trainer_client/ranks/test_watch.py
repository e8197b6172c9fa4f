"""The watch of a rank hears which other rank has given up, and that the ranks' key-value store is gone or silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from trainer_client.ranks import watch as module
from trainer_client.ranks.watch import Watch

# A watch writes and looks four times in this time.
TIMEOUT_SECONDS = 0.2


class Shared:
    """A key-value store in this process, which can be lost, or silent: then no call returns.

    Attributes:
        answers: cleared while the store is silent.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_lost = False
        self.answers = threading.Event()
        self.answers.set()

    def set(self, key: str, value: str) -> None:
        self._require()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._require()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._require()
        return all(key in self.values for key in keys)

    def _require(self) -> None:
        self.answers.wait()
        if self.is_lost:
            raise RuntimeError("the connection was closed by its peer")


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_rank_that_waits_hears_that_another_one_has_given_up() -> None:
    store = Shared()
    waiting, failing = (Watch(store, rank, 2, TIMEOUT_SECONDS) for rank in range(2))
    try:
        with waiting.within("the gather of blocks.0"):
            with failing.within("a step"):
                pass
            assert within(10, lambda: "rank 1" in waiting.places() and "in none, after a step" in waiting.places())
            assert waiting.given_up is None

            failing.abandon("engine.backward()", "OutOfMemoryError: no memory")

            assert within(10, lambda: waiting.given_up is not None)
            assert waiting.given_up == (
                "rank 1 is in engine.backward(), which it gave up (OutOfMemoryError: no memory) (its collective 2)"
            )
            assert "rank 1 was in engine.backward(), which it gave up" in waiting.places()
    finally:
        waiting.close()
        failing.close()


def test_a_rank_that_waits_hears_that_the_store_of_the_ranks_is_gone() -> None:
    store = Shared()
    watch = Watch(store, 0, 2, TIMEOUT_SECONDS)
    try:
        store.is_lost = True
        assert watch.given_up is None
        with watch.within("the gather of blocks.0"):
            assert within(10, lambda: watch.given_up is not None)
        assert "key-value store has gone" in (watch.given_up or "")
    finally:
        watch.close()


def test_the_places_are_those_that_were_heard_last_while_the_store_of_the_ranks_is_silent() -> None:
    """A node that lost its power leaves connections that do not break, so a call to its store never returns."""
    store = Shared()
    waiting, silent = (Watch(store, rank, 2, TIMEOUT_SECONDS) for rank in range(2))
    try:
        with silent.within("the gather of blocks.1"), waiting.within("the gather of blocks.0"):
            assert within(10, lambda: "rank 1 was in the gather of blocks.1" in waiting.places())
            store.answers.clear()

            assert "rank 1 was in the gather of blocks.1 (its collective 1) when last heard of" in waiting.places()

            waiting.abandon("the gather of blocks.0", "it has failed")
            waiting.exchange()
            waiting.close()
    finally:
        store.answers.set()
        waiting.close()
        silent.close()


def test_a_rank_that_waits_hears_that_another_one_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANK_SECONDS", TIMEOUT_SECONDS)
    store = Shared()
    waiting, silent = (Watch(store, rank, 2, TIMEOUT_SECONDS) for rank in range(2))
    try:
        with waiting.within("the gather of blocks.0"):
            assert not within(4 * TIMEOUT_SECONDS, lambda: waiting.given_up is not None), "both say their places"
            # The process of the rank is killed, so its watch writes nothing any more.
            silent.close()
            assert within(10, lambda: waiting.given_up is not None)
        assert waiting.given_up == "rank 1 is silent, as after a loss of its node, of its link or of its process"
    finally:
        waiting.close()


def test_a_rank_that_waits_hears_that_the_key_value_store_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANK_SECONDS", TIMEOUT_SECONDS)
    store = Shared()
    waiting = Watch(store, 1, 2, TIMEOUT_SECONDS)
    try:
        store.answers.clear()
        assert within(10, lambda: waiting.given_up is not None)
        assert "the ranks' key-value store, that of rank 0, has not answered for 0.2 s" in str(waiting.given_up)
    finally:
        store.answers.set()
        waiting.close()
