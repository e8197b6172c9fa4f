"""Leases for activations, which wait in the store between forward and backward.

If a daemon is lost, no call of this module is repeated with the next one, because the activations are lost, too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport import lease_calls
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.errors import StoreUnavailableError


class ActivationLeases:
    """The leases in which one rank keeps activations in the store, from their forward to their backward.

    Args:
        attachments: the rank's connection.
        sender: the thread that parks leases.
        relieve: parks gradients of this rank if the daemon says that requests wait for room, and returns whether it
            says so. A thread that waits for a lease calls it again and again until it returns True.
    """

    def __init__(self, attachments: Attachments, sender: ThreadPoolExecutor, relieve: Callable[[], bool]) -> None:
        self._attachments = attachments
        self._sender = sender
        self._relieve = relieve
        # The thread that reads recalled activations over gRPC streams, so that the training thread can begin a read and
        # go on.
        self._reader = ThreadPoolExecutor(1, "paramserver-activations")

    def close(self) -> None:
        """End the thread that reads recalled activations over gRPC streams. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def acquire(self, nbytes: int) -> Pending[LeasedBytes]:
        """Request a write lease of `nbytes` for an activation. It does not wait.

        `wait` of the result raises StoreBudgetError if the store has no room for the activation.
        """
        at = self._attachments.current
        pending = lease_calls.acquire_one(at, _want(pb.ActivationUse(size_bytes=nbytes)))
        pending.while_late(self._relieve)
        return pending

    def park(self, leased: LeasedBytes) -> LeasedBytes:
        """Park an activation, and return its lease without the bytes. It does not wait.

        The caller must not touch the bytes of `leased` any more. The result can be recalled or released.

        Raises:
            StoreUnavailableError: the session of the lease has ended, so the activation is lost.
        """
        return lease_calls.park(self._sender, self._owner_of(leased), leased)

    def recall(self, parked: LeasedBytes) -> Pending[LeasedBytes]:
        """Request the bytes of a parked activation, to read them. Its lease keeps its id.

        Over streams, a thread reads the bytes while the caller goes on.

        Raises:
            StoreUnavailableError: the session of the lease has ended, so the activation is lost.
        """
        at = self._owner_of(parked)
        at.plane.flush(parked)
        future = lease_calls.acquire(at, [_want(pb.ActivationUse(lease_id=parked.lease_id))])
        pending = Pending(future, lambda response: at.plane.open_read(response.leases[0]))
        if not parked.plane.is_mapped:
            pending = Pending(self._reader.submit(pending.wait), lambda leased: leased)
        pending.while_late(self._relieve)
        return pending

    def lost(self) -> StoreUnavailableError:
        """Return the error to raise for an activation that is lost, because its daemon was lost."""
        return self._attachments.continuation.activations_lost()

    def _owner_of(self, leased: LeasedBytes) -> Attachment:
        at = self._attachments.current
        if not at.owns(leased):
            raise self.lost()
        return at


def _want(use: pb.ActivationUse) -> pb.AcquireLeasesRequest.Want:
    return pb.AcquireLeasesRequest.Want(mode=pb.LEASE_MODE_WRITE, activation=use)
