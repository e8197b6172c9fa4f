"""In which order units' gradients are reduced before the end of backward, although ranks may run different units.

Owns the order of one backward pass. Must never let two ranks begin different reductions at one time.

[Note: one order for all ranks] A reduction is a collective, and a unit's gradients are ready when its backward is over:
at another time on each rank, and on some perhaps never. At the begin of a backward pass the ranks tell each other which
units their forwards used, in which order. Units that all ranks used are reduced in one order, the reverse of rank 0's
first uses: a unit waits for those before it, as a bucket of DDP does. Everything else is reduced at the end of
backward, as agreed there. The exchange is under way while backward begins; the first unit that is over waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainer_client.ranks.collectives import Collectives, PendingRows


class ReductionOrder:
    """Args:
    units: how many there are.
    """

    def __init__(self, units: int, collectives: Collectives) -> None:
        self._units = units
        self._collectives = collectives
        self._used: tuple[int, ...] = ()
        self._exchange: PendingRows | None = None
        self._plan: list[int] = []
        self._over: set[int] = set()
        # What was used and yet not over by the end of the last backward (run without gradients, or no part of the loss)
        # would hold up the others again.
        self._late: frozenset[int] = frozenset()

    def begin(self, used: Sequence[int]) -> None:
        """Backward begins. A collective, which is not waited for.

        Args:
            used: units whose backward this rank expects, in the order of their first use.
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
        """The unit's backward is over on this rank: the units to be reduced now, in this order."""
        self._over.add(unit)
        if self._collectives.world_size == 1:
            return [unit]
        self._agree()
        ready = 0
        while ready < len(self._plan) and self._plan[ready] in self._over:
            ready += 1
        return self._take(ready)

    def finish(self) -> list[int]:
        """Backward is over: the units that other ranks have reduced, or will, and this one has not."""
        self._agree()
        self._late = frozenset(self._used) - self._over
        return self._take(len(self._plan))

    def abandon(self) -> None:
        """Backward has failed."""
        self._exchange = None
        self._plan = []

    def _agree(self) -> None:
        if self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        self._plan = reverse_of_first_uses(exchange.wait().tolist())

    def _take(self, count: int) -> list[int]:
        taken, self._plan = self._plan[:count], self._plan[count:]
        return taken


def reverse_of_first_uses(rows: Iterable[Sequence[int]]) -> list[int]:
    """Of each rank's row of orders (0: not used), the units that all ranks used, rank 0's last one first."""
    first, *others = rows
    common = [unit for unit, order in enumerate(first) if order and all(row[unit] for row in others)]
    return sorted(common, key=lambda unit: -first[unit])
