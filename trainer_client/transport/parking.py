"""Which gradients a rank parks: those for which the store asks, or all of them once a lease has waited for room.

Where the host budget holds all gradients of a step, the store asks for none to be parked. But gradients and other
leases are ranges of many sizes that cannot be moved, so free bytes may be in holes that are too small, and other
clients may hold leases for long. The store spills what is parked. This module must never park a gradient itself,
because only step/gradients.py knows which ones are in use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.transport.planes import LeasedBytes

log = logging.getLogger(__name__)


class Parking:
    """The requests to park that one rank knows of.

    Attributes:
        park_rest: parks all gradients but those that were used last. It is called on a thread that waits for a lease.
    """

    def __init__(self) -> None:
        self.park_rest: Callable[[], None] = lambda: None
        # The groups whose gradient, when it was leased last, came with the request to park it.
        self._asked: set[str] = set()
        self._is_for_all = False

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
        """Have gradients parked now and from now on, because a lease of this rank waits for room."""
        if not self._is_for_all:
            log.warning(
                "the store has had no room for a lease of this rank for some time: gradients that do not fit go "
                "through NVMe from now on; raise host_budget if steps take longer"
            )
        self._is_for_all = True
        self.park_rest()
