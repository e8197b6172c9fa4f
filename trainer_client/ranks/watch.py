"""The watch: which collective each rank is in, for the error message of a rank whose wait for the others times out.

This module owns a thread that writes this rank's place to the store of the process group (torch.distributed's key-value
store), and what it has last read of the other ranks' places. It must never make training wait or fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

_LONGEST_INTERVAL_SECONDS = 5.0
_UNKNOWN = "has said nothing yet"
# A rank writes one of these before its place, to say whether it will come to further collectives.
_TAKES_PART, _GAVE_UP = "+", "-"


@dataclass(frozen=True, slots=True)
class _Place:
    """The collective that a rank is in (`inside`) or was in last.

    Attributes:
        number: how many collectives the rank has begun.
        what: name of the last one, for people.
        inside: whether the rank is still in it.
        is_last: whether the rank does not come to this one nor to any later one.
    """

    number: int
    what: str
    inside: bool
    is_last: bool = False

    def __str__(self) -> str:
        if not self.number:
            return "in no collective so far"
        return f"{'in' if self.inside else 'in none, after'} {self.what} (its collective {self.number})"


class SharedStore(Protocol):
    """The methods of torch.distributed's key-value stores that the watch uses."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Watch:
    """The place of this rank and those of the others, as far as it has heard of them.

    Args:
        store: the key-value store that all ranks share.
        rank: number of this rank.
        world_size: number of ranks.
        timeout_seconds: time-out of a collective. A rank writes its place at least four times in it.
    """

    def __init__(self, store: SharedStore, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval_seconds = min(timeout_seconds / 4, _LONGEST_INTERVAL_SECONDS)
        self._place = _Place(0, "", False)
        self._heard: dict[int, str] = {}
        self._given_up: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paramserver-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Enclose a collective of this rank; `what` names it for people, as "the gather of blocks.2"."""
        number = self._place.number + 1
        self._place = _Place(number, what, True)
        yield
        # This line is skipped if the collective fails, because the rank is then still in it.
        self._place = _Place(number, what, False)

    def abandon(self, what: str, why: str) -> None:
        """Tell the other ranks that this one does not come to `what` or to any later collective, and why."""
        self._place = _Place(self._place.number + 1, f"{what}, which it gave up ({why})", True, is_last=True)
        self._say()

    @property
    def given_up(self) -> str | None:
        """The first rank that was heard to give up or found to have gone, for people; None if the last look found none.

        The watch looks while this rank waits in a collective for longer than its interval, which is 5 s at most.
        """
        return self._given_up

    def places(self) -> str:
        """Return a text with the place of each rank, as of the last time that it was heard of."""
        self._say()
        self._listen()
        ranks = [f"rank {self._rank} (this one) is {self._place}"]
        for rank in range(self._world_size):
            if rank != self._rank:
                ranks.append(f"rank {rank} {self._heard.get(rank, _UNKNOWN)}")
        return "; ".join(ranks)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        seen = self._place
        while not self._closed.wait(self._interval_seconds):
            self._say()
            # This rank reads the others' places while it still waits in a collective. When the wait has failed, it may
            # be too late: the process that holds the key-value store may be gone.
            if self._place.inside and self._place is seen:
                self._listen()
            seen = self._place

    def _say(self) -> None:
        try:
            mark = _GAVE_UP if self._place.is_last else _TAKES_PART
            self._store.set(str(self._rank), f"{time.time()} {mark}{self._place}")
        except RuntimeError:
            # The rank that hosts the store is gone. The collectives report that.
            return

    def _listen(self) -> None:
        for rank in range(self._world_size):
            try:
                if rank == self._rank or not self._store.check([str(rank)]):
                    continue
                said_at, _, place = self._store.get(str(rank)).decode().partition(" ")
            except RuntimeError:
                if self._given_up is None:
                    self._given_up = "the process that has the ranks' key-value store has gone"
                return
            mark, place = place[:1], place[1:]
            self._heard[rank] = f"was {place} when last heard of, {max(0.0, time.time() - float(said_at)):.0f} s ago"
            if mark == _GAVE_UP and self._given_up is None:
                self._given_up = f"rank {rank} is {place}"
