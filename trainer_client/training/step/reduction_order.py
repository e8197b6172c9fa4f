"""The order in which units' gradients are reduced before the end of backward, although ranks may run different units.

This module owns the order of one backward pass. It must never let two ranks begin different reductions at one time.

[Note: one order for all ranks] A reduction is a collective, and a unit's gradients are ready when its backward is over:
at another time on each rank, and on some ranks perhaps never. When a backward pass begins, the ranks tell each other
which units their forwards used, in which order. The units that all ranks used are reduced in one order, the reverse of
the first uses on rank 0. A unit waits for the units before it in this order, as a bucket of DDP does. All other units
are reduced at the end of backward, where the ranks agree on them. The exchange goes on while backward begins, and the
first unit whose backward is over waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainer_client.training.ranks.collectives import Collectives, PendingRows


class ReductionOrder:
    """The order in which one engine reduces units, agreed on among the ranks anew in each backward pass.

    Args:
        units: the number of units of the model.
    """

    def __init__(self, units: int, collectives: Collectives) -> None:
        self._units = units
        self._collectives = collectives
        self._used: tuple[int, ...] = ()
        self._exchange: PendingRows | None = None
        self._plan: list[int] = []
        self._over: set[int] = set()
        # The units that were used and whose backward was not over by the end of the last backward pass, because they
        # ran without gradients or are no part of the loss. In the next pass the units behind them in the order would
        # wait for them again, so these units are left out of the order of reductions.
        self._late: frozenset[int] = frozenset()

    def begin(self, used: Sequence[int]) -> None:
        """Begin to agree on the order of a backward pass. All ranks must call this; it does not wait for them.

        Args:
            used: the units whose backward this rank expects, in the order of their first use.
        """
        self._used = tuple(used)
        self._over = set()
        self._plan = []
        if self._collectives.world_size == 1:
            return
        row = torch.zeros(self._units, dtype=torch.int32)
        for order, unit in enumerate(used, start=1):
            row[unit] = 0 if unit in self._late else order
        self._exchange = self._collectives.start_exchange(row, what="the agreement on an order of reductions")

    def unit_is_over(self, unit: int) -> list[int]:
        """Take note that the unit's backward is over on this rank. Return the units to be reduced now, in order."""
        self._over.add(unit)
        if self._collectives.world_size == 1:
            return [unit]
        self._agree()
        ready = 0
        while ready < len(self._plan) and self._plan[ready] in self._over:
            ready += 1
        return self._take(ready)

    def finish(self) -> list[int]:
        """Return the rest of the order when backward is over. This rank must reduce these units as other ranks do."""
        self._agree()
        self._late = frozenset(self._used) - self._over
        return self._take(len(self._plan))

    def abandon(self) -> None:
        """Forget the order of the pass, because backward has failed. It does not wait for other ranks."""
        self._exchange = None
        self._plan = []

    def _agree(self) -> None:
        """Wait until the ranks have exchanged the units that they used, and derive the order from these. Idempotent."""
        if self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        self._plan = reverse_of_first_uses(exchange.wait().tolist())

    def _take(self, count: int) -> list[int]:
        """Return the next `count` units of the order, and remove them from the order."""
        taken, self._plan = self._plan[:count], self._plan[count:]
        return taken


def reverse_of_first_uses(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return the units that all ranks used, first the one that rank 0 used last.

        reverse_of_first_uses([[1, 2, 0], [2, 1, 3]]) == [1, 0]

    Args:
        rows: for each rank a sequence, with an entry for each unit: 1 if the unit was used first on that rank, 2 if
            it was the second one, and so on; 0 if the rank did not use the unit.
    """
    first, *others = rows
    common = [unit for unit, order in enumerate(first) if order and all(row[unit] for row in others)]
    return sorted(common, key=lambda unit: -first[unit])
