"""The calls about leases that gradients, other slabs and activations share: acquire, open, park, give back.

Each function makes a call on one attachment. Its caller decides whether the call is repeated with the next daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.channel import Pending, translate
from trainer_client.client.transport.planes import LeasedBytes, Parked
from trainer_client.client.transport.shard_group_name import ShardGroupName


def acquire(at: Attachment, wants: Sequence[pb.AcquireLeasesRequest.Want]) -> Future[Any]:
    """Request leases, of which the store grants all or none, and return the future of the response."""
    at.check()
    return at.begin(at.stub.AcquireLeases, pb.AcquireLeasesRequest(wants=wants), at.deadlines.lease)


def open_write(at: Attachment, lease: pb.Lease) -> LeasedBytes:
    """Return a granted write lease with the memory to write its bytes to."""
    leased = at.plane.open_write(lease)
    return replace(leased, asks_to_park=True) if lease.park else leased


def unit_of(wants: Sequence[pb.AcquireLeasesRequest.Want]) -> str:
    """Return the name of the unit that a request for leases is for, from the name of its first shard group."""
    return ShardGroupName.unit_of(wants[0].slab.group) if wants else ""


def acquire_one(
    at: Attachment,
    want: pb.AcquireLeasesRequest.Want,
    waited: Callable[[Any, float, float], None] = lambda _response, _began, _ended: None,
) -> Pending[LeasedBytes]:
    """Request a write lease. `waited` is called with the response and with begin and end of the wait, see Pending."""
    return Pending(
        acquire(at, [want]),
        lambda response: open_write(at, response.leases[0]),
        waited,
        partial(release_granted, at),
    )


def release_granted(at: Attachment, response: pb.AcquireLeasesResponse) -> None:
    """Give back the leases of a response for which its caller has no use any more."""
    at.release_quietly(lease.lease_id for lease in response.leases)


def park(
    sender: ThreadPoolExecutor,
    at: Attachment,
    leased: LeasedBytes,
    *,
    is_sent: bool = False,
    kept: torch.Tensor | None = None,
) -> LeasedBytes:
    """Park a lease, and return it without its bytes. It does not wait.

    Args:
        sender: the thread that makes the call.
        at: the attachment that the lease belongs to.
        leased: the lease; the caller must not touch its bytes any more.
        is_sent: whether the bytes were made visible to the store already.
        kept: the copy of the bytes that this process keeps, if it keeps one.
    """
    sent = Pending(sender.submit(_park, at, leased, is_sent=is_sent), lambda _: None)
    return LeasedBytes(
        lease_id=leased.lease_id,
        version=leased.version,
        data=torch.empty(0, dtype=torch.uint8) if kept is None else kept,
        plane=leased.plane,
        asks_to_park=leased.asks_to_park,
        parked=Parked(nbytes=leased.data.numel(), sent=sent),
    )


def _park(at: Attachment, leased: LeasedBytes, *, is_sent: bool) -> None:
    at.check()
    if not is_sent:
        leased.plane.flush(leased)
    at.check_leases()
    try:
        at.begin(at.stub.ParkGradients, pb.ParkGradientsRequest(lease_ids=[leased.lease_id])).result()
    except grpc.RpcError as error:
        # The lease to release may have been consumed or released before, so the status code NOT_FOUND is no failure.
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise translate(error) from None
