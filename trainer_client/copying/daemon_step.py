"""A committed step in a daemon, which a client holds and reads to copy it, while training goes on.

This module owns a reader in the store and the leases on the parts that are read next. It must never hold leases on more
than _PARTS_AHEAD parts, because each leased part takes room in the store's host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import torch

from paramserver.contract.limits import READ_BLOCK_BYTES
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.store_client.connection import Call, Connection, StoreSession
from trainer_client.client.store_client.reader import BATCHED_RANGES, Batch, StoreReaderSync, TensorPart, batches
from trainer_client.client.transport.channel import (
    COMMIT_DEADLINE_SECONDS,
    CONTROL_DEADLINE_SECONDS,
    LEASE_DEADLINE_SECONDS,
)
from trainer_client.copying.description import PART_BYTES, StepDescription, StoredSlab, slabs_of

_PARTS_AHEAD = 3
# A step's slabs are read in parts, of which each takes at most 1 / _ARENA_SHARE of the store's host memory.
_ARENA_SHARE = 64
# The most bytes of slabs in one request for digests. The store reads all of these bytes before it answers, and has to
# answer within the deadline of one call.
_DIGESTED_AT_ONCE_BYTES = 256 << 20


class DaemonStep:
    """A committed step in a daemon, from which it is copied or backed up; it implements StepSource.

    The daemon holds the step until the context of this object ends, so the step cannot be deleted meanwhile.
    """

    def __init__(
        self,
        connection: Connection,
        job: str,
        step: int | None = None,
        kept: str | None = None,
        *,
        put_as: str | None = None,
    ) -> None:
        """Open the step: the one named `kept`, or number `step`, or without both the newest one.

        If `put_as` is given, the description has it as the name of the job, so a copy of the step gets this name in the
        target.

        Raises:
            StoreNotFoundError: there is no such job, step or kept step.
            StoreError: the daemon refuses, or cannot be reached.
        """
        self.name = connection.address
        self._reader = StoreReaderSync(connection, job, step, Call(None, CONTROL_DEADLINE_SECONDS), kept=kept)
        try:
            self.description = self._describe()
            if put_as is not None:
                self.description.step.job = put_as
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the reader, so that the daemon no longer holds the step."""
        self._reader.close()

    def _describe(self) -> StepDescription:
        call = Call(None, COMMIT_DEADLINE_SECONDS)

        def attempt(session: StoreSession, reader_id: int) -> StepDescription:
            step, parameters, groups = None, list[pb.Parameter](), list[pb.DescribeStepResponse.StoredGroup]()
            for response in session.stream("DescribeStep", pb.DescribeStepRequest(reader_id=reader_id), call):
                step = response.step if step is None else step
                parameters += response.parameters
                groups += response.groups
            assert step is not None
            return StepDescription(step=step, parameters=parameters, slabs=slabs_of(groups))

        described = self._reader.on_session(call, attempt)
        states = {rank: self._reader.client_state(rank) for rank in described.step.ranks}
        return StepDescription(
            step=described.step, parameters=described.parameters, slabs=described.slabs, client_states=states
        )

    def digests(self, slabs: Sequence[StoredSlab]) -> list[bytes]:
        """Return the digests of slabs, which the daemon computes; see StepSource."""
        found: list[bytes] = []
        for some in digest_batches(slabs):
            call = Call(None, COMMIT_DEADLINE_SECONDS)

            def attempt(
                session: StoreSession, reader_id: int, some: Sequence[StoredSlab] = some, call: Call = call
            ) -> list[bytes]:
                names = [slab.to_name() for slab in some]
                request = pb.DigestSlabsRequest(reader_id=reader_id, slabs=names)
                return [one.digest for one in session.call("DigestSlabs", request, call).slabs]

            found += self._reader.on_session(call, attempt)
        return found

    def read(self, slabs: Sequence[StoredSlab]) -> Iterator[tuple[StoredSlab, Iterator[torch.Tensor]]]:
        """Yield slabs with their parts; see StepSource.

        While the caller uses a part, the store reads the next parts into its host memory.
        """
        part_bytes = self._reader.on_session(
            Call(None, CONTROL_DEADLINE_SECONDS),
            lambda session, _: max(READ_BLOCK_BYTES, min(PART_BYTES, session.arena_bytes // _ARENA_SHARE)),
        )
        parts = (part for slab in slabs for part in batches(_cut(slab, part_bytes), part_bytes))
        with contextlib.closing(self._reader.leased(parts, _copied, _new_call, _PARTS_AHEAD)) as copies:
            for slab in slabs:
                yield slab, _parts_of(slab, copies)


def _new_call() -> Call:
    return Call(None, LEASE_DEADLINE_SECONDS)


def _copied(session: StoreSession, call: Call, part: Batch, lease: pb.Lease) -> torch.Tensor:
    """Return the bytes of a leased part, without the gaps that the lease has between the part's ranges.

    In a lease each range begins at an aligned place, so there may be gaps.
    """
    data = torch.empty(lease.size_bytes, dtype=torch.uint8)
    session.copy_out(call, lease, data)
    if sum(one.nbytes for one in part.parts) == part.nbytes:
        return data[: part.nbytes]
    return torch.cat([data[at : at + one.nbytes] for one, at in zip(part.parts, part.places, strict=True)])


def _parts_of(slab: StoredSlab, copies: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the parts of a slab: take them from `copies`, the parts of all slabs, until the slab is complete."""
    left = slab.size_bytes
    while left:
        data = next(copies)
        left -= data.numel()
        yield data


def digest_batches(slabs: Sequence[StoredSlab]) -> Iterator[list[StoredSlab]]:
    """Yield the slabs in batches whose digests the store can compute within the deadline of one call."""
    batch: list[StoredSlab] = []
    size = 0
    for slab in slabs:
        if batch and (size + slab.lease_bytes > _DIGESTED_AT_ONCE_BYTES or len(batch) >= BATCHED_RANGES):
            yield batch
            batch, size = [], 0
        batch.append(slab)
        size += slab.lease_bytes
    if batch:
        yield batch


def _cut(slab: StoredSlab, part_bytes: int) -> Iterator[TensorPart]:
    """Yield the ranges of a slab that are leased: its shards, of which those above `part_bytes` are divided."""
    most = part_bytes // slab.dtype.itemsize
    for shard in slab.group.shards:
        for first in range(0, shard.numel, most):
            count, offset = min(most, shard.numel - first), shard.offset + first
            yield TensorPart(fqn=shard.fqn, kind=slab.kind, dtype=slab.dtype, offset=offset, numel=count)
