"""The watch: which collective each rank is in, and whether it is still there.

A rank whose wait for the others fails says in its error where they were. A rank that waits learns within some 25 s that
another one has been silent, as after a loss of its node or of the link to it. gloo sees only that a connection was
closed, and not always that (`make partial` met a rank that waited on after the other one had been killed). The watch
is a thread that needs Python's lock for microseconds, so a busy rank is not taken for a lost one, unless other code of
its process holds that lock for 20 s. The heartbeats of its session would be missing by then, too.

This module owns a thread that writes this rank's place to the store of the process group (torch.distributed's key-value
store), and what it has last read of the other ranks' places. Only this thread uses the key-value store, because a call
to it does not return while the process or the node that has it is silent. The module must never make training fail, nor
wait for longer than _NEWS_SECONDS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from paramserver.contract.silence import RANK_INTERVAL_SECONDS, RANK_SECONDS

# A caller waits no longer than this for news. The key-value store answers within milliseconds, unless it is lost.
_NEWS_SECONDS = 1.0
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


@dataclass(frozen=True, slots=True)
class _Heard:
    """What was last heard of another rank.

    Attributes:
        place: its place, for people.
        at: when it was there, in seconds of time.monotonic().
        said: what it has written.
        times: how many looks, one each interval, have found just that. They are counted, and no time is measured, so
            that a pause of all ranks at once, as of a machine that is suspended, is no silence of the others.
    """

    place: str
    at: float
    said: str
    times: int

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
        self._interval_seconds = min(timeout_seconds / 4, RANK_INTERVAL_SECONDS)
        self._place = _Place(0, "", False)
        self._heard: dict[int, _Heard] = {}
        self._given_up: str | None = None
        # When the call of the key-value store that is under way was made, in time.monotonic(); None if there is none.
        self._asking_since: float | None = None
        # Callers count what they ask the thread for, and the thread counts what it has done of that.
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._is_closed = False
        # The number of waits for other ranks that are under way on threads beside the training.
        self._beside = 0
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

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Enclose a wait for other ranks on a thread beside the training, so that the watch looks at their places."""
        self._beside += 1
        try:
            yield
        finally:
            self._beside -= 1

    def abandon(self, what: str, why: str) -> None:
        """Note that this rank does not come to `what` or to any later collective, and why.

        The next `exchange` tells the other ranks.
        """
        self._place = _Place(self._place.number + 1, f"{what}, which it gave up ({why})", True, is_last=True)

    @property
    def given_up(self) -> str | None:
        """The first rank that was heard to give up, or found to have gone or to be silent, for people; None for none.

        The watch looks while this rank waits in a collective for longer than its interval, which is 5 s at most, and
        while a thread beside the training waits for other ranks.
        """
        since = self._asking_since
        if self._given_up is None and since is not None and time.monotonic() - since > RANK_SECONDS:
            self._given_up = (
                f"the process that has the ranks' key-value store, that of rank 0, has not answered for "
                f"{RANK_SECONDS:g} s"
            )
        return self._given_up

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
        for rank in range(self._world_size):
            if rank != self._rank:
                ranks.append(f"rank {rank} {heard.get(rank, _UNKNOWN)}")
        return "; ".join(ranks)

    def close(self) -> None:
        """End the thread, without waiting for a key-value store that does not answer; idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_NEWS_SECONDS)

    def _run(self) -> None:
        seen = self._place
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._asked > self._done, self._interval_seconds)
                if self._is_closed:
                    return
                asked = self._asked
            self._say()
            # This rank reads the others' places while it still waits in a collective, because the process that has the
            # key-value store may be gone when the wait has failed.
            is_asked = asked > self._done
            if is_asked or self._beside or (self._place.inside and self._place is seen):
                self._listen(counts=not is_asked)
            seen = self._place
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _say(self) -> None:
        try:
            mark = _GAVE_UP if self._place.is_last else _TAKES_PART
            with self._asking():
                self._store.set(str(self._rank), f"{time.time()} {mark}{self._place}")
        except RuntimeError:
            # The rank that hosts the store is gone. The collectives report that.
            return

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Enclose one call of the key-value store."""
        self._asking_since = time.monotonic()
        try:
            yield
        finally:
            self._asking_since = None

    def _listen(self, *, counts: bool) -> None:
        """Read what the other ranks have said last.

        Args:
            counts: whether this is the look of an interval, of which four without news make a silence.
        """
        heard = self._heard.copy()
        try:
            for rank in range(self._world_size):
                if rank == self._rank:
                    continue
                with self._asking():
                    said = self._store.get(str(rank)).decode() if self._store.check([str(rank)]) else None
                if said is not None:
                    heard[rank] = self._hear(rank, said, counts=counts)
        except RuntimeError:
            if self._given_up is None:
                self._given_up = "the process that has the ranks' key-value store has gone"
        # Other threads may read the former dictionary now, so it is replaced and not changed.
        self._heard = heard

    def _hear(self, rank: int, said: str, *, counts: bool) -> _Heard:
        said_at, _, place = said.partition(" ")
        mark, place = place[:1], place[1:]
        last = self._heard.get(rank)
        times = last.times if last is not None and last.said == said else 0
        heard = _Heard(place, time.monotonic() - max(0.0, time.time() - float(said_at)), said, times + counts)
        if self._given_up is None:
            if mark == _GAVE_UP:
                self._given_up = f"rank {rank} is {place}"
            elif (heard.times - 1) * self._interval_seconds >= RANK_SECONDS:
                self._given_up = f"rank {rank} is silent, as after a loss of its node, of its link or of its process"
        return heard
