"""The order in which a step uses its units: recorded once, it tells what comes next and when a unit is needed again.

Owns the recorded order. Must never raise or lose its knowledge because a step deviates from the last one: a unit that
is skipped, repeated or new only shifts the cursor, and what was really used becomes the expectation of the next step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Clock:
    """Counts uses over the life of a job; positions of all traces are readings of one clock."""

    def __init__(self, now: int = 0) -> None:
        self.now = now


class Trace:
    """The uses of a repeating sequence (a training step, an inference forward), as indices of units."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expected: list[int] = []
        self._places: dict[int, list[int]] = {}  # unit -> its indices in _expected, ascending
        self._cursor = 0  # index of the next expected use
        self._used: list[int] = []

    def use(self, unit: int) -> int:
        """Takes note that a unit is used now; its position."""
        self._clock.now += 1
        self._used.append(unit)
        places = self._places.get(unit, [])
        following = bisect_left(places, self._cursor)
        if following < len(places):
            # Uses in between were skipped in this step. A unit that is not expected any more leaves the cursor alone.
            self._cursor = places[following] + 1
        return self._clock.now

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """The expected rest of the sequence as (unit, position). Ends where the sequence ends."""
        for distance, unit in enumerate(self._expected[self._cursor :], start=1):
            yield unit, self._clock.now + distance

    def next_unit(self) -> int | None:
        """The unit expected next in this sequence, if any."""
        return self._expected[self._cursor] if self._cursor < len(self._expected) else None

    def next_use(self, unit: int) -> int | None:
        """The position at which a unit is expected next, in this sequence or in its next repetition."""
        places = self._places.get(unit)
        if not places:
            return None
        following = bisect_left(places, self._cursor)
        if following < len(places):
            distance = places[following] - self._cursor
        else:
            distance = len(self._expected) - self._cursor + places[0]
        return self._clock.now + distance + 1

    def end(self) -> None:
        """The sequence is over: what was used is what the next repetition is expected to use."""
        self._expected = self._used
        self._used = []
        self._cursor = 0
        self._places = {}
        for index, unit in enumerate(self._expected):
            self._places.setdefault(unit, []).append(index)
