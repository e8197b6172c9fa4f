"""Leases for activations, which wait in the store between forward and backward.

No call of this module is repeated with the next daemon, because the activations of a lost daemon are gone with it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport import lease_calls
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.errors import StoreUnavailableError


class ActivationLeases:
    """The leases for activations of one rank.

    Args:
        attachments: the rank's connection.
        sender: the thread that parks leases.
        relieve: has gradients parked if requests wait for room, and returns whether they do. A thread that waits for a
            lease calls it again and again until then.
    """

    def __init__(self, attachments: Attachments, sender: ThreadPoolExecutor, relieve: Callable[[], bool]) -> None:
        self._attachments = attachments
        self._sender = sender
        self._relieve = relieve
        # A thread of its own reads activations over streams.
        self._reader = ThreadPoolExecutor(1, "paramserver-activations")

    def close(self) -> None:
        """End the thread that reads. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def acquire(self, nbytes: int) -> Pending[LeasedBytes]:
        """Request a write lease. The result of `wait` raises StoreBudgetError if there is no room."""
        at = self._attachments.current
        pending = Pending(
            lease_calls.acquire(at, [_want(pb.ActivationUse(size_bytes=nbytes))]),
            lambda response: lease_calls.open_write(at, response.leases[0]),
            release=partial(lease_calls.release_granted, at),
        )
        pending.while_late(self._relieve)
        return pending

    def park(self, leased: LeasedBytes) -> LeasedBytes:
        """Park an activation, and return its lease without the bytes. It does not wait.

        The caller must not touch the bytes of `leased` any more. The result can be recalled or released.

        Raises:
            StoreUnavailableError: its session is over, and the activation with it.
        """
        return lease_calls.park(self._sender, self._owner_of(leased), leased)

    def recall(self, parked: LeasedBytes) -> Pending[LeasedBytes]:
        """Request a parked activation, to read it; the lease stays the same one.

        Over streams, a thread reads the bytes while the caller goes on.

        Raises:
            StoreUnavailableError: its session is over, and the activation with it.
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
        """Return the error for activations that only the lost daemon had."""
        return self._attachments.activations_lost()

    def _owner_of(self, leased: LeasedBytes) -> Attachment:
        at = self._attachments.current
        if not at.owns(leased):
            raise self.lost()
        return at


def _want(use: pb.ActivationUse) -> pb.AcquireLeasesRequest.Want:
    return pb.AcquireLeasesRequest.Want(mode=pb.LEASE_MODE_WRITE, activation=use)
