"""Which gradients a rank parks: those that the store asks for, or all of them once a lease has waited for room.

Where the host budget holds all gradients of a step, the store asks for none to be parked. But gradients and other
leases are ranges of many sizes that cannot be moved, so free bytes may be in holes that are too small, and other
clients may hold leases for long. The store spills what is parked. It has room for `GRADIENTS_AT_ONCE` gradients of each
rank beside those, so the few that were used last are not parked. This module owns the order of their uses. It must
never look at values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from paramserver.contract.limits import GRADIENTS_AT_ONCE
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.planes import LeasedBytes

log = logging.getLogger(__name__)


class UsedGradient(Protocol):
    """A gradient that the store may keep elsewhere."""

    @property
    def is_settled(self) -> bool:
        """Whether no request for its memory is under way."""

    def park(self) -> None:
        """Have the store keep the gradient elsewhere, if it asks for that, until it is used again."""


class Parking:
    """The gradients of one rank, and the requests to park that it knows of."""

    def __init__(self) -> None:
        # All gradients that were ever used.
        self._gradients: dict[UsedGradient, None] = {}
        # Those that were used since they were parked last, the least recently used one first.
        self._used: dict[UsedGradient, None] = {}
        # The groups whose gradient, when it was leased last, came with the request to park it.
        self._asked: set[str] = set()
        self._is_for_all = False

    def use(self, gradient: UsedGradient) -> None:
        """Take note that a gradient is used now, and park the one that was not used for longest if they are too many.

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
        """Take note that a gradient was parked, or is not needed any more. Idempotent."""
        self._used.pop(gradient, None)

    @property
    def is_wanted(self) -> bool:
        """Whether the rank is to park any gradients that it does not use for a while.

        The store asks for all of them if host memory may not hold those of a step, and else for those placed on NVMe.
        """
        return self._is_for_all or bool(self._asked)

    def wants(self, leased: LeasedBytes) -> bool:
        """Return whether a leased gradient is to be parked when it is not used for a while."""
        return self._is_for_all or leased.asks_to_park

    def note(self, groups: Iterable[str], response: pb.AcquireLeasesResponse) -> None:
        """Take note of what the store asks for with leases of the gradients of `groups`."""
        for group, lease in zip(groups, response.leases, strict=True):
            (self._asked.add if lease.park else self._asked.discard)(group)

    def begin_for_all(self) -> None:
        """Have gradients parked now and from now on, because a lease of this rank waits for room.

        All are parked but those that were used last and those for which a request is under way. This is called on a
        thread that waits for a lease.
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
