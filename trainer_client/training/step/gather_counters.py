"""The cost of gathers since the last step report: how many found their bytes ready, and how long each unit waited.

This module owns the counts. It must never decide anything by them, nor read a clock: Residency counts and measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# A gather counts as a hit if it has waited for the store for at most this long. On one machine, an answer that the
# store has already sent takes up to this long to arrive, so such a gather has not waited for bytes.
HIT_SECONDS = 0.0002


@dataclass(slots=True, kw_only=True)
class UnitGathers:
    """The number and the cost of the gathers of one unit, or of all units together.

    Attributes:
        gathers: how often parameters were made whole of leased bytes. Uses of a unit that was whole already are not
            counted.
        hits: how many of the gathers found their bytes ready when the trainer began to wait for them.
        predicted: how many of the gathers this rank had announced to the store before the use, or had no need to
            announce because the unit was expected and lives in the store's host memory.
        waited_seconds: the stall time between the use of a unit and the grant of its leases, without the time that the
            trainer computed meanwhile.
        fetched_bytes: how many bytes of host memory this rank leased.
        copied_bytes: how many of the fetched bytes were copied to where the unit uses them; the rest was mapped.
        device_bytes: how many bytes were not leased in host memory because this rank has kept them on its device.
    """

    gathers: int = 0
    hits: int = 0
    predicted: int = 0
    waited_seconds: float = 0.0
    fetched_bytes: int = 0
    copied_bytes: int = 0
    device_bytes: int = 0

    def add(self, other: UnitGathers) -> None:
        """Add the counts of `other` to the counts of this object."""
        self.gathers += other.gathers
        self.hits += other.hits
        self.predicted += other.predicted
        self.waited_seconds += other.waited_seconds
        self.fetched_bytes += other.fetched_bytes
        self.copied_bytes += other.copied_bytes
        self.device_bytes += other.device_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSnapshot:
    """A copy of the counts of all gathers at one moment, for the step report.

    Attributes:
        total: the sum over all units.
        by_unit: the counts of each unit that was gathered, by FQN (the root: ""), in the model's order.
    """

    total: UnitGathers = field(default_factory=UnitGathers)
    by_unit: dict[str, UnitGathers] = field(default_factory=dict)


class GatherCounters:
    """Counts the gathers of each unit since the last `reset`. Residency adds each gather by `note`."""

    def __init__(self, fqns: Sequence[str]) -> None:
        """Begin with zero for each unit.

        Args:
            fqns: the FQNs of the units, by index.
        """
        self._fqns = tuple(fqns)
        self._counts = [UnitGathers() for _ in fqns]

    def note(self, unit: int, gather: UnitGathers) -> None:
        """Add the counts of one gather, which has ended, to those of the unit with the index `unit`."""
        self._counts[unit].add(gather)

    def snapshot(self) -> GatherSnapshot:
        """Return a copy of the counts since the last `reset`, which later gathers do not change."""
        total = UnitGathers()
        by_unit: dict[str, UnitGathers] = {}
        for fqn, counts in zip(self._fqns, self._counts, strict=True):
            if counts != UnitGathers():
                by_unit.setdefault(fqn, UnitGathers()).add(counts)
                total.add(counts)
        return GatherSnapshot(total=total, by_unit=by_unit)

    def reset(self) -> None:
        """Set the counts of all units to zero, because a new step report begins."""
        self._counts = [UnitGathers() for _ in self._fqns]
