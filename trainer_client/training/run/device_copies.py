"""The memory of this rank's device that the store may use for copies of parameters: how much, and for how long.

This module owns the amount. It must never take or give memory while a unit is gathered, because a gather may hold a
lease on a copy.
"""

from __future__ import annotations

import torch

from trainer_client.base.lanes.lanes import Lanes
from trainer_client.client.transport.device_offer import DeviceOffer


class CopyRoom:
    """The device memory that one rank offers to the store, in which the store keeps device copies of parameters.

    Attributes:
        offered_bytes: how many bytes the store may use now.
    """

    def __init__(self, offer: DeviceOffer, lanes: Lanes, device: torch.device, most_bytes: int) -> None:
        """Offer no memory yet.

        Args:
            most_bytes: the most bytes that are ever offered, because copies of all parameters that the rank reads from
                the store take so many. It is 0 on the CPU, where no memory is offered.
        """
        self.offered_bytes = 0
        self._offer = offer
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
            # `finish` waits for copies to the device and then releases their leases. The store answers the offer of
            # device memory only after these leases have ended, so `finish` comes before the offer.
            self._lanes.finish()
            self._offer.offer(self._device, nbytes)
            self.offered_bytes = nbytes

    def withdraw(self) -> None:
        """Take the offered memory back from the store until `restore`. It releases units and can raise, as `offer`."""
        self._withdrawn_bytes = max(self._withdrawn_bytes, self.offered_bytes)
        self.offer(0)

    def restore(self) -> None:
        """Offer the memory again that `withdraw` has taken back; do nothing if there is none."""
        nbytes, self._withdrawn_bytes = self._withdrawn_bytes, 0
        if nbytes:
            self.offer(nbytes)
