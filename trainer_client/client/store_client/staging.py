"""The putting of slabs into a step of a job that is open for writing, and the commit of the step.

A slab becomes a part of the step when its lease is published, and the step can be read from its commit on. This module
owns the leases until they are published. It must never leave a lease behind, not even after a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.store_client.connection import Call, LeaseRequest, StoreSession, result_of

# The most shards and groups in one RegisterShards request. The store needs some milliseconds to parse a request of this
# size, and other clients wait meanwhile.
_SHARDS_A_REQUEST = 16_384

# The bytes of a slab, in order, as pairs: the position of a tensor's first byte in the slab, and the tensor (uint8,
# contiguous).
Content = Iterable[tuple[int, torch.Tensor]]


def codecs_of(groups: Iterable[pb.ShardGroup]) -> set[str]:
    """Return the names of the codecs that encode slabs of the groups. A store without `CODECS` would not see them."""
    return {kind.codec for group in groups for kind in group.kinds} - {""}


def registrations(groups: Iterable[pb.ShardGroup]) -> Iterator[pb.RegisterShardsRequest]:
    """Yield the requests that declare a job's shard groups to the store.

    Each request has a limited number of shards, because other clients wait while the store parses one.
    """
    request, count = pb.RegisterShardsRequest(), 0
    for group in groups:
        request.groups.append(group)
        count += 1 + len(group.shards)
        if count >= _SHARDS_A_REQUEST:
            yield request
            request, count = pb.RegisterShardsRequest(), 0
    if request.groups:
        yield request


def put_slabs(
    session: StoreSession,
    step: int,
    slabs: Iterable[pb.SlabName],
    contents: Iterable[Content],
    new_call: Callable[[], Call],
    *,
    most: int,
    ahead: int = 1,
) -> None:
    """Put slabs for a step: lease each, fill it and publish it. While a slab is filled, earlier ones are published.

    Args:
        session: the session that has the job open.
        step: the step.
        slabs: the names of the slabs.
        contents: the content of each slab. The next content is taken when the one before it has been put. The bytes of
            a slab behind its content are zeroed, because its memory may still have bytes of another session.
        new_call: returns the call whose deadline limits the next request or copy.
        most: the most slabs that are leased or being published at once.
        ahead: the most slabs that are leased at once. With 1, no granted lease is held while a slow source makes its
            content.

    Raises:
        StoreError: the store failed or refused, or a deadline has passed. Leases that were not published are released.
    """
    waiting = iter(slabs)
    leasing: deque[LeaseRequest] = deque()
    publishing: deque[Any] = deque()
    try:
        for content in contents:
            if len(publishing) == most:
                result_of(publishing.popleft())
            while len(leasing) < ahead and len(leasing) + len(publishing) < most:
                if (slab := next(waiting, None)) is None:
                    break
                want = pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_WRITE, step=step)
                leasing.append(LeaseRequest(session, [want], new_call()))
            (lease,) = leasing[0].granted()
            _fill(session, lease, content, new_call)
            releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id, publish=True)]
            request = pb.ReleaseLeasesRequest(releases=releases)
            publishing.append(session.begin("ReleaseLeases", request, new_call()))
            leasing.popleft()
        for published in publishing:
            result_of(published)
    finally:
        for unused in leasing:
            unused.give_back()


def _fill(session: StoreSession, lease: pb.Lease, content: Content, new_call: Callable[[], Call]) -> None:
    end = 0
    for at, data in content:
        session.copy_in(new_call(), lease, data, at)
        end = at + data.numel()
    if end < lease.size_bytes:
        session.copy_in(new_call(), lease, torch.zeros(lease.size_bytes - end, dtype=torch.uint8), end)


def commit_step(step: int, votes: Iterable[tuple[StoreSession, bytes]], settled_step: int, call: Call) -> bool:
    """Commit a step on behalf of all ranks of a run, and return whether it is durable.

    Args:
        step: the step.
        votes: for each rank its session and the client state that is stored with the commit.
        settled_step: the newest step that all nodes of the job are known to have; older ones may be deleted.
        call: the call whose deadline the commit has.

    Raises:
        StoreError: the store failed or refused, or the deadline has passed.
    """
    begun = [
        session.begin(
            "CommitStep", pb.CommitStepRequest(step=step, client_state=state, settled_step=settled_step), call
        )
        for session, state in votes
    ]
    answers = [result_of(vote) for vote in begun]
    return all(answer.durable for answer in answers)
