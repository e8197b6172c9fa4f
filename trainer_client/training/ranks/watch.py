"""The watch: which collective each rank is in, for the text of an error.

If a rank's wait for other ranks fails, its error says in which collective each of them was. pulse.py finds out whether
another rank is still there.

A rank's place is the collective that it is in, or was in last. This module owns a thread that writes this rank's place
to the key-value store of the process group (torch.distributed's), and the other ranks' places as the thread has last
read them. Only this thread uses the key-value store, because a call to the key-value store does not return while the
process or the node that has it is silent. The module must never make training fail, nor wait for longer than
_NEWS_SECONDS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

# The longest time that a caller waits until this rank has read the other ranks' places (the collectives that they are
# in) from the key-value store. The key-value store answers within milliseconds, unless its process is lost.
_NEWS_SECONDS = 1.0
_UNKNOWN = "has said nothing yet"
# A rank writes its place (the collective that it is in) to the key-value store every _INTERVAL_SECONDS. If it is still
# in the same collective as the last time, it also reads the other ranks' places.
_INTERVAL_SECONDS = 5.0
# A rank reads the places of at most so many other ranks, because the one process that hosts the key-value store has to
# answer each read of all ranks.
_MOST_PLACES = 64


@dataclass(frozen=True, slots=True)
class _WaitingPlace:
    """A rank's place: the collective that the rank is in (`inside`) or was in last.

    Attributes:
        number: how many collectives the rank has begun.
        what: name of the last collective that the rank has begun, for error messages.
        inside: whether the rank is still in that collective.
    """

    number: int
    what: str
    inside: bool

    def __str__(self) -> str:
        if not self.number:
            return "in no collective so far"
        return f"{'in' if self.inside else 'in none, after'} {self.what} (its collective {self.number})"


@dataclass(frozen=True, slots=True)
class _Heard:
    """The collective of another rank, as this rank has last read it from the key-value store.

    Attributes:
        place: a text that names the collective that the other rank is in, or was in last.
        at: when the other rank wrote the text, in seconds of this rank's time.monotonic().
    """

    place: str
    at: float

    def __str__(self) -> str:
        return f"was {self.place} when last heard of, {time.monotonic() - self.at:.0f} s ago"


class SharedStore(Protocol):
    """The methods of torch.distributed's key-value stores that the watch uses."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Watch:
    """Records in which collective this rank is, and reads from the key-value store where the other ranks are.

    A rank's place is the collective that the rank is in, or was in last. Errors of collectives list all places.

    Args:
        store: torch.distributed's key-value store, which all ranks share.
        rank: number of this rank.
        world_size: number of ranks.
        timeout_seconds: time-out of a collective. A rank writes its place at least four times within this time.
    """

    def __init__(self, store: SharedStore, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval_seconds = min(timeout_seconds / 4, _INTERVAL_SECONDS)
        self._place = _WaitingPlace(0, "", False)
        self._heard: dict[int, _Heard] = {}
        # `_asked` is the number of exchanges with the key-value store that callers have asked the watch's thread for,
        # and `_done` is the number of those that it has made.
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paramserver-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Record that this rank is in a collective until the context ends.

        Args:
            what: name of the collective in error messages, as "the gather of blocks.2".
        """
        number = self._place.number + 1
        self._place = _WaitingPlace(number, what, True)
        yield
        # If the collective raises an error, the rank's place is not changed, because the rank counts as still in the
        # collective.
        self._place = _WaitingPlace(number, what, False)

    def abandon(self, what: str, why: str) -> str:
        """Record that this rank has given up the collective `what`, and return a text that says so, for an error.

        The next `exchange` writes the same text to the key-value store, so that the errors of other ranks contain it.

        Args:
            what: name of the collective.
            why: the reason, for example the error of this rank.
        """
        self._place = _WaitingPlace(self._place.number + 1, f"{what}, which it gave up ({why})", True)
        return f"rank {self._rank} is {self._place}"

    def exchange(self) -> None:
        """Write this rank's place to the key-value store, and read the other ranks' places from it.

        If the key-value store does not answer within _NEWS_SECONDS, the call returns without an error.
        """
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= mine or self._is_closed, _NEWS_SECONDS)

    def places(self) -> str:
        """Exchange places, and return a text that says of each rank in which collective it is, or was last.

        If the key-value store does not answer in time, the text has the places that this rank has read before.
        """
        self.exchange()
        heard = self._heard
        ranks = [f"rank {self._rank} (this one) is {self._place}"]
        ranks += [f"rank {rank} {heard.get(rank, _UNKNOWN)}" for rank in self._others]
        if unseen := self._world_size - len(ranks):
            ranks.append(f"{unseen} further ranks are not listed")
        return "; ".join(ranks)

    @property
    def _others(self) -> Sequence[int]:
        """The other ranks whose places this rank reads: at most _MOST_PLACES of them."""
        return [rank for rank in range(self._world_size) if rank != self._rank][:_MOST_PLACES]

    def close(self) -> None:
        """End the thread that writes and reads places; idempotent.

        The call does not wait for a key-value store that does not answer.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_NEWS_SECONDS)

    def _run(self) -> None:
        seen = looked = self._place
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._asked > self._done, self._interval_seconds)
                if self._is_closed:
                    return
                asked = self._asked
            place = self._place
            self._say(place)
            # If this rank still waits in the collective of its last round, it reads the other ranks' places once now.
            # It cannot rely on a read after its wait has failed, because the process that has the key-value store may
            # be gone then.
            if asked > self._done or (place.inside and place is seen and place is not looked):
                self._listen()
                looked = place
            seen = place
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _say(self, place: _WaitingPlace) -> None:
        # `set` raises RuntimeError if the process with the key-value store (a TCPStore) is gone. The error is ignored,
        # because the collectives report that this process is gone.
        with suppress(RuntimeError):
            self._store.set(str(self._rank), f"{time.time()} {place}")

    def _listen(self) -> None:
        """Read from the key-value store the places that the other ranks have written there last."""
        heard = self._heard.copy()
        with suppress(RuntimeError):
            for rank in self._others:
                if self._store.check([str(rank)]):
                    said_at, _, place = self._store.get(str(rank)).decode().partition(" ")
                    heard[rank] = _Heard(place, time.monotonic() - max(0.0, time.time() - float(said_at)))
        # Other threads may be reading the dictionary of the other ranks' places, so a new dictionary replaces it, and
        # the old one is not changed.
        self._heard = heard
