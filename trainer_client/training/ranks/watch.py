"""The watch: which collective each rank is in, for the text of an error.

A rank whose wait for the others fails says in its error where they were. Whether another rank is still there is the
matter of pulse.py.

This module owns a thread that writes this rank's place to the store of the process group (torch.distributed's key-value
store), and what it has last read of the other ranks' places. Only this thread uses the key-value store, because a call
to it does not return while the process or the node that has it is silent. The module must never make training fail, nor
wait for longer than _NEWS_SECONDS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

# A caller waits no longer than this for news. The key-value store answers within milliseconds, unless it is lost.
_NEWS_SECONDS = 1.0
_UNKNOWN = "has said nothing yet"
# A rank writes its place this often, and looks at the others' if it is still in the same collective.
_INTERVAL_SECONDS = 5.0
# A rank looks at no more places than these, because one process answers for all of them.
_MOST_PLACES = 64


@dataclass(frozen=True, slots=True)
class _WaitingPlace:
    """The collective that a rank is in (`inside`) or was in last.

    Attributes:
        number: how many collectives the rank has begun.
        what: name of the last one, for people.
        inside: whether the rank is still in it.
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
    """What was last heard of another rank.

    Attributes:
        place: its place, for people.
        at: when it was there, in seconds of time.monotonic().
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
        self._interval_seconds = min(timeout_seconds / 4, _INTERVAL_SECONDS)
        self._place = _WaitingPlace(0, "", False)
        self._heard: dict[int, _Heard] = {}
        # Callers count what they ask the thread for, and the thread counts what it has done of that.
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paramserver-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Enclose a collective of this rank; `what` names it for people, as "the gather of blocks.2"."""
        number = self._place.number + 1
        self._place = _WaitingPlace(number, what, True)
        yield
        # This line is skipped if the collective fails, because the rank is then still in it.
        self._place = _WaitingPlace(number, what, False)

    def abandon(self, what: str, why: str) -> str:
        """Note that this rank does not come to `what` or to any later collective, and why; return that for people.

        The next `exchange` writes it.
        """
        self._place = _WaitingPlace(self._place.number + 1, f"{what}, which it gave up ({why})", True)
        return f"rank {self._rank} is {self._place}"

    def exchange(self) -> None:
        """Write this rank's place and read those of the others, unless that takes longer than _NEWS_SECONDS."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= mine or self._is_closed, _NEWS_SECONDS)

    def places(self) -> str:
        """Return a text with the place of each rank, as of the last time that it was heard of.

        If the key-value store does not answer in time, these are the places that were heard before.
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
        """The ranks at whose places this one looks."""
        return [rank for rank in range(self._world_size) if rank != self._rank][:_MOST_PLACES]

    def close(self) -> None:
        """End the thread, without waiting for a key-value store that does not answer; idempotent."""
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
            # This rank reads the others' places once while it still waits in a collective, because the process that has
            # the key-value store may be gone when the wait has failed.
            if asked > self._done or (place.inside and place is seen and place is not looked):
                self._listen()
                looked = place
            seen = place
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _say(self, place: _WaitingPlace) -> None:
        # The error occurs if the rank that hosts the store is gone. The collectives report that.
        with suppress(RuntimeError):
            self._store.set(str(self._rank), f"{time.time()} {place}")

    def _listen(self) -> None:
        """Read what the other ranks have said last."""
        heard = self._heard.copy()
        with suppress(RuntimeError):
            for rank in self._others:
                if self._store.check([str(rank)]):
                    said_at, _, place = self._store.get(str(rank)).decode().partition(" ")
                    heard[rank] = _Heard(place, time.monotonic() - max(0.0, time.time() - float(said_at)))
        # Other threads may read the former dictionary now, so it is replaced and not changed.
        self._heard = heard
