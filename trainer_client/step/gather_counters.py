"""What gathers have cost since the last step report: how many found their bytes ready, and how long each unit waited.

Owns the counts. Must never decide anything by them, nor read a clock: it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# An answer that was under way already takes that long on one machine: what waits no longer did not wait for bytes.
HIT_SECONDS = 0.0002


@dataclass(slots=True, kw_only=True)
class UnitGathers:
    """Of one unit, or of all together.

    Attributes:
        gathers: times that its parameters were made whole of leased bytes; not those that were whole already.
        hits: of them, those whose bytes were there when they were waited for.
        predicted: of them, those that the store had been told of before the use, or that were expected and at home in
            its memory.
        waited_seconds: between the use of a unit and the grant of its leases, less what was computed meanwhile: stall
            time.
        fetched_bytes: that this rank leased.
        copied_bytes: of them, those that were copied to where the unit uses them, on the CPU; the others were mapped.
    """

    gathers: int = 0
    hits: int = 0
    predicted: int = 0
    waited_seconds: float = 0.0
    fetched_bytes: int = 0
    copied_bytes: int = 0

    def add(self, other: UnitGathers) -> None:
        self.gathers += other.gathers
        self.hits += other.hits
        self.predicted += other.predicted
        self.waited_seconds += other.waited_seconds
        self.fetched_bytes += other.fetched_bytes
        self.copied_bytes += other.copied_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSnapshot:
    """Attributes:
    total: of all units.
    by_unit: the units that were gathered, by FQN (the root: ""), in the model's order.
    """

    total: UnitGathers = field(default_factory=UnitGathers)
    by_unit: dict[str, UnitGathers] = field(default_factory=dict)


class GatherCounters:
    """Counts since the last `reset`, by unit."""

    def __init__(self, fqns: Sequence[str]) -> None:
        """`fqns`: of the units, by index."""
        self._fqns = tuple(fqns)
        self._counts = [UnitGathers() for _ in fqns]

    def note(self, unit: int, gather: UnitGathers) -> None:
        """A gather of the unit with that index has ended."""
        self._counts[unit].add(gather)

    def snapshot(self) -> GatherSnapshot:
        """What was counted so far, a copy."""
        total = UnitGathers()
        by_unit: dict[str, UnitGathers] = {}
        for fqn, counts in zip(self._fqns, self._counts, strict=True):
            if counts != UnitGathers():
                by_unit.setdefault(fqn, UnitGathers()).add(counts)
                total.add(counts)
        return GatherSnapshot(total=total, by_unit=by_unit)

    def reset(self) -> None:
        """Begins at zero."""
        self._counts = [UnitGathers() for _ in self._fqns]
