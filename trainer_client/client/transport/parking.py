"""Which gradients a rank parks: those that the store asks for, or all of them once a lease has waited for room.

Where the host budget holds all gradients of a step, the store asks for none to be parked. But gradients and other
leases are ranges of many sizes that cannot be moved, so free bytes may be in holes that are too small, and other
clients may hold leases for long. So once a lease has waited for room, this rank parks its gradients, and the store
spills them. Beside the parked ones, the store has room for `GRADIENTS_AT_ONCE` gradients of each rank, so the few that
were used last are not parked. This module owns the order of their uses. It must never look at values.
"""

from __future__ import annotations

import logging
from typing import Protocol

from paramserver.contract.limits import GRADIENTS_AT_ONCE
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.planes import LeasedBytes

log = logging.getLogger(__name__)


class UsedGradient(Protocol):
    """A gradient as `Parking` sees it. When it is parked, the store may spill it and use its memory otherwise."""

    @property
    def is_settled(self) -> bool:
        """Whether no request for the gradient's memory is under way. `Parking` leaves it alone while one is."""

    def park(self) -> None:
        """Park the gradient until its next use. Do nothing if the store has not asked to park it."""


class Parking:
    """The choice of the gradients that one rank parks, made from their uses and from what the store asks for."""

    def __init__(self) -> None:
        # All gradients that this rank has ever used.
        self._gradients: dict[UsedGradient, None] = {}
        # The gradients that this rank has used since they were last parked, the least recently used one first.
        self._used: dict[UsedGradient, None] = {}
        # The groups whose gradient the store asked this rank to park, when it granted the last lease of the gradient.
        self._asked: set[str] = set()
        self._is_for_all = False

    def use(self, gradient: UsedGradient) -> None:
        """Note that a gradient is used now. If too many are in use, park the one that was not used for longest.

        Call this before the gradient's memory is asked for, because the store may have no room before another gradient
        is parked.
        """
        self._gradients[gradient] = None
        self._used.pop(gradient, None)
        while len(self._used) >= GRADIENTS_AT_ONCE:
            oldest = next(iter(self._used))
            del self._used[oldest]
            oldest.park()
        self._used[gradient] = None

    def remove(self, gradient: UsedGradient) -> None:
        """Count a gradient as used no longer, because it was parked or is not needed any more. Idempotent."""
        self._used.pop(gradient, None)

    @property
    def is_wanted(self) -> bool:
        """Whether the rank is to park any gradients that it does not use for a while.

        The store asks for all gradients if host memory may not hold those of a step. If it can hold them, the store
        asks only for the gradients that are placed on NVMe.
        """
        return self._is_for_all or bool(self._asked)

    def wants(self, leased: LeasedBytes) -> bool:
        """Return whether a leased gradient is to be parked when it is not used for a while."""
        return self._is_for_all or leased.asks_to_park

    def note(self, group: str, response: pb.AcquireLeasesResponse) -> None:
        """Note whether the store, with the lease of the gradient of `group`, asks to park the gradient."""
        (lease,) = response.leases
        (self._asked.add if lease.park else self._asked.discard)(group)

    def begin_for_all(self) -> None:
        """Have gradients parked now and from now on, because a lease of this rank waits for room.

        All gradients are parked except those that were used last and those for which a request is under way. This is
        called on a thread that waits for a lease.
        """
        if not self._is_for_all:
            log.warning(
                "the store has had no room for a lease of this rank for some time: gradients that do not fit go "
                "through NVMe from now on; raise host_budget if steps take longer"
            )
        self._is_for_all = True
        for gradient in list(self._gradients):
            if gradient.is_settled and gradient not in self._used:
                gradient.park()
