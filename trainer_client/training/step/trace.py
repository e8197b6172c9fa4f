"""The order in which a step uses its units. Once recorded, it tells which unit comes next, and when.

This module owns the recorded order. It must never raise or lose its knowledge because a step deviates from the last
one: a unit that is skipped, repeated or new only moves the cursor, and the uses of this step become the expectation of
the next one. A unit that was not used at all keeps its place for a while, because experts and conditional layers come
back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence, Set

# A unit is not expected any more after this many repetitions of the trace in a row in which it was not used.
FORGOTTEN_AFTER = 8


class Clock:
    """A count of uses over the life of a job. The positions of all traces are readings of one clock."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def go_on_from(self, now: int) -> None:
        """Set the clock to the reading `now` that a commit carried, so that positions go on growing after a resume."""
        self.now = now


class Trace:
    """The uses of a repeating sequence (a training step, an inference forward), as indices of units.

    Attributes:
        ends_in_update: whether the sequence ends in an update of the trainable parameters.
    """

    def __init__(self, clock: Clock, *, amid: Trace | None = None) -> None:
        """Begin with no recorded order, so that no next unit is known before the first `end`.

        Args:
            amid: for a sequence that does not end in an update, such as an inference, the sequence that goes on when
                this one is over: the training step.
        """
        self.ends_in_update = amid is None
        self._amid = amid
        self._clock = clock
        self._expected: list[int] = []
        # Maps each expected unit to the indices of its uses in `_expected`, in ascending order.
        self._places: dict[int, list[int]] = {}
        # The index of the next expected use in `_expected`.
        self._cursor = 0
        self._used: list[int] = []
        # For each expected unit that was not used in the last repetition of the trace: the number of repetitions in a
        # row without a use.
        self._missed: dict[int, int] = {}

    def use(self, unit: int) -> int:
        """Take note that a unit is used now. Return the position of the use."""
        self._clock.now += 1
        self._used.append(unit)
        places = self._places.get(unit, [])
        following = bisect_left(places, self._cursor)
        if following < len(places):
            # The expected uses before this one were skipped in this step, so the cursor moves past them. If the unit is
            # not expected at or after the cursor, the cursor stays where it is.
            self._cursor = places[following] + 1
        return self._clock.now

    def mark(self) -> tuple[int, int]:
        """Return the present place in the sequence, to which `rewind` goes back if a forward fails."""
        return self._cursor, len(self._used)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget the uses since `mark`, because the forward that used the units has failed and may be repeated."""
        self._cursor, used = mark
        del self._used[used:]

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """Yield (unit, position) for each use that is expected before this sequence ends."""
        for index in range(self._cursor, len(self._expected)):
            yield self._expected[index], self._clock.now + 1 + index - self._cursor

    def after_end(self) -> Iterator[tuple[int, int]]:
        """Yield (unit, position) for each use that is expected in the next repetition of the sequence."""
        rest = len(self._expected) - self._cursor
        for distance, unit in enumerate(self._expected, start=rest + 1):
            yield unit, self._clock.now + distance

    def next_unit(self) -> int | None:
        """Return the unit that is expected next in this sequence, or None if no further use is expected in it."""
        return self._expected[self._cursor] if self._cursor < len(self._expected) else None

    def expects(self, unit: int) -> bool:
        """Return whether a unit is used in the expected rest of the sequence."""
        places = self._places.get(unit, [])
        return bool(places) and places[-1] >= self._cursor

    def next_use(self, unit: int) -> int | None:
        """Return the position at which a unit is expected next, or None if it is not expected.

        The use may be in this sequence, in its next repetition, or in the sequence that goes on afterwards.
        """
        uses = [self._own_next_use(unit), self._amid.next_use(unit) if self._amid is not None else None]
        return min((use for use in uses if use is not None), default=None)

    def use_after(self, unit: int, position: int, *, before_update: bool) -> int | None:
        """Return the position at which a unit is expected again after its use at `position`; None if it is not.

        Uses that follow each other at once count as one, because the unit stays gathered from one to the next.

        Args:
            unit: the index of the unit.
            position: the position of the unit's present use, or of its next one.
            before_update: whether uses after the next update of the trainable parameters do not count, because these
                uses need other bytes than the use at `position`.
        """
        # The index in `_expected` of the use at `position`.
        index = self._cursor + position - self._clock.now - 1
        places = self._places.get(unit, [])
        following, last = bisect_left(places, index + 1), index
        while following < len(places) and places[following] == last + 1:
            following, last = following + 1, last + 1
        if following < len(places):
            return position + places[following] - index
        uses = [] if self._amid is None else [self._amid.next_use(unit)]
        if places and not (before_update and self.ends_in_update):
            uses.append(position + len(self._expected) - index + places[0])
        return min((use for use in uses if use is not None), default=None)

    def _own_next_use(self, unit: int) -> int | None:
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
        """End the sequence, and make its uses the expectation of the next repetition.

        Units that were expected and not used this time stay in the expectation, at their old places.
        """
        used, self._used = self._used, []
        self._cursor = 0
        if not used or used == self._expected:
            return
        missed = {unit: self._missed.get(unit, 0) + 1 for unit in self._places.keys() - set(used)}
        self._missed = {unit: times for unit, times in missed.items() if times < FORGOTTEN_AFTER}
        self._expected = _with_missed(self._missed.keys(), self._expected, used)
        self._places = {}
        for index, unit in enumerate(self._expected):
            self._places.setdefault(unit, []).append(index)


def _with_missed(missed: Set[int], expected: Sequence[int], used: Sequence[int]) -> list[int]:
    """Return `used` with each of the `missed` units inserted after the use that came before it in `expected`.

    _with_missed({7}, expected=[0, 7, 1], used=[0, 1, 2]) == [0, 7, 1, 2]
    """
    if not missed:
        return list(used)
    uses = Counter(used)
    seen: Counter[int] = Counter()
    # The missed units, by the use that they come after in the expected order. A use is given as (unit, 1-based number
    # of its use in the step).
    after: dict[tuple[int, int], list[int]] = {}
    place = (-1, 0)  # The key for missed units that come before all uses.
    for unit in expected:
        if unit in missed:
            after.setdefault(place, []).append(unit)
        elif seen[unit] < uses[unit]:
            seen[unit] += 1
            place = unit, seen[unit]
    merged = after.get((-1, 0), [])
    seen.clear()
    for unit in used:
        seen[unit] += 1
        merged += [unit, *after.get((unit, seen[unit]), [])]
    return merged
