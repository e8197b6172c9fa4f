"""Where each rank is, for the moment when one of them waits in vain.

Owns a thread that tells the others, through the store of the process group, what this rank does, and what it has last
heard of them. Must never be waited for by training, nor fail it.
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


@dataclass(frozen=True, slots=True)
class _Place:
    """What a rank does, or did last. `number` counts its collectives."""

    number: int
    what: str
    inside: bool

    def __str__(self) -> str:
        if not self.number:
            return "in no collective so far"
        return f"{'in' if self.inside else 'in none, after'} {self.what} (its collective {self.number})"


class SharedStore(Protocol):
    """What the watch needs of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Watch:
    """Args:
    store: that all ranks of the group share.
    timeout_seconds: how long a rank waits; ranks say several times in that time where they are.
    """

    def __init__(self, store: SharedStore, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval_seconds = min(timeout_seconds / 4, _LONGEST_INTERVAL_SECONDS)
        self._place = _Place(0, "", False)
        self._heard: dict[int, str] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paramserver-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """A collective of this rank; for people: "the gather of blocks.2"."""
        number = self._place.number + 1
        self._place = _Place(number, what, True)
        yield
        # Not where it failed: that is where this rank still is.
        self._place = _Place(number, what, False)

    def give_up(self, what: str, why: str) -> None:
        """Tell the other ranks that this one does not come to `what` or to any later collective, and why."""
        self._place = _Place(self._place.number + 1, f"{what}, which it gave up ({why})", True)
        self._say()

    def places(self) -> str:
        """Where each rank is, or was when it was last heard of."""
        self._say()
        self._listen()
        ranks = [f"rank {self._rank} (this one) is {self._place}"]
        for rank in range(self._world_size):
            if rank != self._rank:
                ranks.append(f"rank {rank} {self._heard.get(rank, _UNKNOWN)}")
        return "; ".join(ranks)

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        seen = self._place
        while not self._closed.wait(self._interval_seconds):
            self._say()
            # Whom this rank waits for may be gone, and the store with it, by the time that the wait has failed.
            if self._place.inside and self._place is seen:
                self._listen()
            seen = self._place

    def _say(self) -> None:
        try:
            self._store.set(str(self._rank), f"{time.time()} {self._place}")
        except RuntimeError:
            return  # the rank that keeps the store has gone: the collectives tell

    def _listen(self) -> None:
        for rank in range(self._world_size):
            try:
                if rank == self._rank or not self._store.check([str(rank)]):
                    continue
                said_at, _, place = self._store.get(str(rank)).decode().partition(" ")
            except RuntimeError:
                return
            self._heard[rank] = f"was {place} when last heard of, {max(0.0, time.time() - float(said_at)):.0f} s ago"
