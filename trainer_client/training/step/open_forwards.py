"""The forwards whose backward passes are not over, recorded by the use of a unit that they belong to.

This module owns the numbers of uses and the records of forwards. It must never gather or reduce: the hooks do.

[Note: uses of tiles] A tile of a tied weight has several uses, in modules of their own (model/tile.py). The backward of
each use ends by itself: the tile is released and its gradient is reduced at the end of each use. All other tiles of the
layer are used between two uses, so a rank that kept each tile until its last use would hold the whole layer or its
whole gradient. So records of forwards, and places in the order of reductions, belong to a use. An early update begins
after the last use. Units of modules have one use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

from trainer_client.training.model.units import Unit
from trainer_client.training.step.gradient_hooks import AllGradientsHook


@dataclass(slots=True, eq=False)
class OpenForward:
    """The record of a forward whose backward is not over.

    Attributes:
        hook: the hook by which the backward ends, which the graph of the forward keeps; None if no hook can tell when
            the backward ends.
    """

    hook: ref[AllGradientsHook] | None = None

    def expect_no_backward(self) -> None:
        """Remove the hook, because no backward of this forward will come. Idempotent."""
        if self.hook is not None and (hook := self.hook()) is not None:
            hook.remove()


class OpenForwards:
    """The open forwards of one engine, by which the hooks know whether a backward of a unit may still come.

    Each use of a unit has a number. The number of a unit's first use is the unit's index.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        """Give each use of these units a number, by which the other methods name the use. No forward is open yet."""
        self._unit_of: list[Unit] = list(units)
        self._uses: list[list[int]] = [[unit.index] for unit in units]
        for unit in units:
            for _ in unit.uses[1:]:
                self._uses[unit.index].append(len(self._unit_of))
                self._unit_of.append(unit)
        self._of_use: list[set[OpenForward]] = [set() for _ in self._unit_of]
        # A dict serves as an ordered set, so the values are None.
        self._used: dict[int, None] = {}
        # The forwards of units that began within the outermost forward under way, each as (use, forward). If no forward
        # is under way, the forwards that began within the last outermost one.
        self._newest: list[tuple[int, OpenForward]] = []

    def uses_of(self, unit: Unit) -> Sequence[int]:
        """Return the numbers of a unit's uses, in the order of `Unit.uses`."""
        return self._uses[unit.index]

    def unit_of(self, use: int) -> Unit:
        """Return the unit that the use with the number `use` belongs to."""
        return self._unit_of[use]

    @property
    def used(self) -> Sequence[int]:
        """The uses that were noted since the last backward pass, each once and in the order in which they came first.

        A use whose forward is still open after the pass stays.
        """
        return list(self._used)

    def note_use(self, use: int) -> None:
        """Take note that a forward with gradients has begun a use."""
        self._used.setdefault(use)

    def forget_uses(self, count: int) -> None:
        """Forget the uses that were noted after the first `count` ones, because their forward has failed."""
        while len(self._used) > count:
            self._used.popitem()

    def end_pass(self) -> None:
        """Forget the uses of which no forward is open, because a backward pass is over."""
        self._used = {use: None for use in self._used if self.is_open(use)}

    def is_open(self, use: int) -> bool:
        """Return whether a forward of this use is open, so that its backward may still come."""
        return bool(self._of_use[use])

    def is_another_open(self, use: int) -> bool:
        """Return whether a forward of another use of the same unit is open."""
        return any(self._of_use[other] for other in self.uses_of(self.unit_of(use)) if other != use)

    def begin_outermost(self) -> None:
        """Take note that an outermost forward begins, so that forwards before it cannot be undone any more."""
        self._newest.clear()

    @property
    def begun(self) -> int:
        """The number of forwards that began within the outermost forward so far, for `undo`."""
        return len(self._newest)

    def begin(self, use: int) -> OpenForward:
        """Return the record of a forward of this use, which begins now and is open until `end`."""
        forward = OpenForward()
        self._of_use[use].add(forward)
        self._newest.append((use, forward))
        return forward

    def end(self, use: int, forward: OpenForward) -> None:
        """Remove the record of a forward of this use, because its backward is over. Idempotent."""
        self._of_use[use].discard(forward)

    def undo(self, begun: int) -> None:
        """Remove the records of failed forwards: those that began within the outermost one after its first `begun`."""
        for use, forward in self._newest[begun:]:
            forward.expect_no_backward()
            self.end(use, forward)
        del self._newest[begun:]

    def end_all(self) -> None:
        """Remove the records and hooks of all forwards, because the step ends and no backward follows."""
        for forwards in self._of_use:
            for forward in forwards:
                forward.expect_no_backward()
            forwards.clear()
        self._used.clear()
