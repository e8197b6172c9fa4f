"""The forwards whose backward passes are not over, by the use of a unit that each of them is.

This module owns the numbers of uses and the records of forwards. It must never gather or reduce: the hooks do.

[Note: uses of tiles] A tile of a tied weight has several uses, in modules of their own (model/tile.py). The backward of
each use ends by itself: the tile is released then, and its gradient is reduced, because between the uses all other
tiles of the layer are used, and this rank would hold the whole layer or its whole gradient. So records of forwards, and
places in the order of reductions, belong to a use. An early update begins after the last use. Units of modules have one
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

from trainer_client.training.model.units import Unit
from trainer_client.training.step.gradient_hooks import AllGradientsHook


@dataclass(slots=True, eq=False)
class OpenForward:
    """A forward whose backward is not over.

    Attributes:
        hook: the hook by which the backward ends, which the graph of the forward keeps; None if no hook can tell.
    """

    hook: ref[AllGradientsHook] | None = None

    def expect_no_backward(self) -> None:
        """Remove the hook, because the backward is not to come. Idempotent."""
        if self.hook is not None and (hook := self.hook()) is not None:
            hook.remove()


class OpenForwards:
    """The open forwards of one engine. Each use of a unit has a number; that of its first use is the unit's index."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Begin without forwards, and number the uses of all units."""
        self._unit_of: list[Unit] = list(units)
        self._uses: list[list[int]] = [[unit.index] for unit in units]
        for unit in units:
            for _ in unit.uses[1:]:
                self._uses[unit.index].append(len(self._unit_of))
                self._unit_of.append(unit)
        self._of_use: list[set[OpenForward]] = [set() for _ in self._unit_of]
        # The forwards that began within the outermost one under way, or within the last one, with their uses.
        self._newest: list[tuple[int, OpenForward]] = []

    def uses_of(self, unit: Unit) -> Sequence[int]:
        """Return the numbers of a unit's uses, in the order of `Unit.uses`."""
        return self._uses[unit.index]

    def unit_of(self, use: int) -> Unit:
        """Return the unit of which this is a use."""
        return self._unit_of[use]

    def is_open(self, use: int) -> bool:
        """Return whether a forward of the use is open."""
        return bool(self._of_use[use])

    def is_another_open(self, use: int) -> bool:
        """Return whether a forward of another use of the same unit is open."""
        return any(self._of_use[other] for other in self.uses_of(self.unit_of(use)) if other != use)

    def begin_outermost(self) -> None:
        """Take note that an outermost forward begins, so that those before it cannot be undone any more."""
        self._newest.clear()

    @property
    def begun(self) -> int:
        """The number of forwards that began within the outermost one so far, for `undo`."""
        return len(self._newest)

    def begin(self, use: int) -> OpenForward:
        """Return the record of a forward of this use, which begins now and is open until `end`."""
        forward = OpenForward()
        self._of_use[use].add(forward)
        self._newest.append((use, forward))
        return forward

    def end(self, use: int, forward: OpenForward) -> None:
        """Take note that the backward of a forward of this use is over. Idempotent."""
        self._of_use[use].discard(forward)

    def undo(self, begun: int) -> None:
        """Expect no backward of the forwards that began within the outermost one after its first `begun` ones."""
        for use, forward in self._newest[begun:]:
            forward.expect_no_backward()
            self.end(use, forward)
        del self._newest[begun:]

    def end_all(self) -> None:
        """Expect no backward of any forward, because the step ends."""
        for forwards in self._of_use:
            for forward in forwards:
                forward.expect_no_backward()
            forwards.clear()
