"""The offer of this rank's device memory to the store, which is made anew to each next daemon."""

from __future__ import annotations

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.device_memory import OfferedMemory


class DeviceOffer:
    """The memory of one rank's device in which the store may have copies of slabs placed.

    Args:
        attachments: the rank's connection.

    Attributes:
        memory: the memory that was offered last; None before the first offer.
    """

    def __init__(self, attachments: Attachments) -> None:
        self.memory: OfferedMemory | None = None
        self._attachments = attachments
        # The attachment over which the memory was offered. A new attachment needs a new offer.
        self._offered_to: Attachment | None = None

    def offer(self, device: torch.device, nbytes: int) -> None:
        """Offer `nbytes` of this rank's device to the store for copies of slabs, instead of what was offered before.

        The caller has released all leases on slabs. With less memory than before, the store drops the copies that do
        not fit any more.

        Raises:
            StoreError: the store refused or failed the call.
            torch.OutOfMemoryError: the device has too little memory for more than before.
        """
        memory = self.memory
        if memory is None:
            memory = OfferedMemory(device, nbytes)
        elif nbytes > memory.nbytes:
            memory.resize(nbytes)
        offered_to = self._send(device, nbytes)
        if self.memory is not None and self._offered_to is not offered_to:
            memory.renew()
        self.memory, self._offered_to = memory, offered_to
        if nbytes >= memory.nbytes:
            return
        try:
            memory.resize(nbytes)
        except torch.OutOfMemoryError:
            # The device has no room for the smaller memory beside the larger one, so the copies of slabs cannot be
            # moved to the smaller memory. Therefore this rank withdraws the offer, so that the store forgets all
            # copies, frees the larger memory, and offers the smaller one.
            self._send(device, 0)
            memory.resize(0)
            memory.resize(nbytes)
            self._offered_to = self._send(device, nbytes)

    def _send(self, device: torch.device, nbytes: int) -> Attachment:
        """Offer `nbytes` of device memory to the store, and return the attachment over which the offer was made."""
        request = pb.OfferDeviceMemoryRequest(size_bytes=nbytes, device=str(device))

        def act(at: Attachment) -> Attachment:
            at.call(at.stub.OfferDeviceMemory, request)
            return at

        return self._attachments.retry_over_restarts(act)

    def offer_again(self, at: Attachment) -> OfferedMemory | None:
        """Offer the device memory to the next daemon, if `at` is an attachment to one, and return the memory."""
        memory = self.memory
        if memory is not None and self._offered_to is not at:
            memory.renew()
            at.send(
                at.stub.OfferDeviceMemory,
                pb.OfferDeviceMemoryRequest(size_bytes=memory.nbytes, device=str(memory.device)),
            )
            self._offered_to = at
        return memory
