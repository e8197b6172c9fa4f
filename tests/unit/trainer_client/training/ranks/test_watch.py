"""The watch of a rank knows where the others are, also while the ranks' key-value store is gone or silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trainer_client.training.ranks import watch as module
from trainer_client.training.ranks.watch import Watch

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


def test_a_rank_hears_where_the_others_are_and_that_one_has_given_up() -> None:
    store = Shared()
    waiting, failing = (Watch(store, rank, 2, TIMEOUT_SECONDS) for rank in range(2))
    try:
        with waiting.within("the gather of blocks.0"):
            with failing.within("a step"):
                pass
            assert within(10, lambda: "rank 1 was in none, after a step" in waiting.places())

            news = failing.abandon("engine.backward()", "OutOfMemoryError: no memory")

            assert news == (
                "rank 1 is in engine.backward(), which it gave up (OutOfMemoryError: no memory) (its collective 2)"
            )
            assert within(10, lambda: "rank 1 was in engine.backward(), which it gave up" in waiting.places())
    finally:
        waiting.close()
        failing.close()


def test_the_places_are_those_that_were_heard_last_when_the_store_of_the_ranks_is_gone() -> None:
    """A rank that waits looks once before its wait has failed, because the store may be gone then."""
    store = Shared()
    waiting, other = (Watch(store, rank, 2, TIMEOUT_SECONDS) for rank in range(2))
    try:
        with other.within("the gather of blocks.1"), waiting.within("the gather of blocks.0"):
            assert within(10, lambda: bool(waiting._heard))
            store.is_lost = True
            assert "rank 1 was in the gather of blocks.1" in waiting.places()
    finally:
        waiting.close()
        other.close()


def test_a_text_names_so_many_ranks_at_most() -> None:
    store = Shared()
    watch = Watch(store, 3, 1000, TIMEOUT_SECONDS)
    try:
        text = watch.places()
        assert text.count("has said nothing yet") == module._MOST_PLACES
        assert text.endswith("; 935 further ranks are not listed")
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
