"""The memory of this rank's device that the store may use for copies of parameters: how much, and for how long.

This module owns the amount. It must never take or give memory while a unit is gathered, because a gather may hold a
lease on a copy.
"""

from __future__ import annotations

import torch

from trainer_client.base.lanes.lanes import Lanes
from trainer_client.client.transport.rank_store import RankStore


class CopyRoom:
    """The offer of one rank.

    Attributes:
        offered_bytes: how much the store may use now.
    """

    def __init__(self, store: RankStore, lanes: Lanes, device: torch.device, most_bytes: int) -> None:
        """Begin without an offer.

        Args:
            most_bytes: what copies of all parameters that the rank reads from the store take; 0 on the CPU, where
                nothing is offered.
        """
        self.offered_bytes = 0
        self._store = store
        self._lanes = lanes
        self._device = device
        self._most_bytes = most_bytes
        self._withdrawn_bytes = 0

    def offer(self, budget: int) -> None:
        """Offer at most `budget` bytes from now on. All units of the rank are released.

        Raises:
            StoreError: the store refused or failed the call.
            torch.OutOfMemoryError: the device has too little memory for more copies than before.
        """
        nbytes = min(budget, self._most_bytes)
        if nbytes != self.offered_bytes:
            # Leases that this rank owes the store are released first, because the store waits for them.
            self._lanes.finish()
            self._store.offer_device_memory(self._device, nbytes)
            self.offered_bytes = nbytes

    def withdraw(self) -> None:
        """Give the memory back to the device until `restore`; see `offer`."""
        self._withdrawn_bytes = max(self._withdrawn_bytes, self.offered_bytes)
        self.offer(0)

    def restore(self) -> None:
        """Offer again what `withdraw` has given back."""
        nbytes, self._withdrawn_bytes = self._withdrawn_bytes, 0
        if nbytes:
            self.offer(nbytes)
