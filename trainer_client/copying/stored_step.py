"""A committed step of a daemon, held and read by a client that copies it. Training goes on meanwhile.

This module owns a reader in the store and the leases on the parts that are read next. It must never hold more than
_PARTS_AHEAD parts, because each takes room in the store's host memory, and one in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from paramserver.contract.limits import GATHER_ALIGNMENT_BYTES, READ_BLOCK_BYTES
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.copying.description import PART_BYTES, StepDescription, StoredSlab, slabs_of
from trainer_client.errors import StoreError
from trainer_client.model.slot_table import round_up
from trainer_client.store_client.connection import Call, Connection, StoreSession, release, result_of
from trainer_client.store_client.reader import StoreReaderSync
from trainer_client.transport.channel import COMMIT_DEADLINE_SECONDS, CONTROL_DEADLINE_SECONDS, LEASE_DEADLINE_SECONDS

_PARTS_AHEAD = 3
# A part takes at most 1 / _ARENA_SHARE of the store's host memory, and has at most this many ranges.
_ARENA_SHARE = 64
_MOST_RANGES = 4096
# The most bytes of slabs in one request for digests. The store reads all of them before it answers, within the deadline
# of one call.
_DIGESTED_AT_ONCE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Consecutive bytes of a slab's compact form, as ranges of its tensors."""

    slab: StoredSlab
    ranges: list[pb.TensorRange] = field(default_factory=list)

    def to_want(self, reader_id: int) -> pb.AcquireLeasesRequest.Want:
        want = pb.AcquireLeasesRequest.Want(mode=pb.LEASE_MODE_READ)
        for source in self.ranges:
            source.reader_id = reader_id
        if len(self.ranges) == 1:
            want.range.CopyFrom(self.ranges[0])
        else:
            want.ranges.extend(self.ranges)
        return want

    def compact(self, leased: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the ranges one after another. In a lease each range begins at an aligned place."""
        sizes = [source.numel * self.slab.dtype.itemsize for source in self.ranges]
        if all(size % GATHER_ALIGNMENT_BYTES == 0 for size in sizes[:-1]):
            return leased[: sum(sizes)]
        pieces, at = [], 0
        for size in sizes:
            pieces.append(leased[at : at + size])
            at += round_up(size, GATHER_ALIGNMENT_BYTES)
        return torch.cat(pieces)


class StoredStep:
    """A step of a daemon's job, which implements StepSource. As a context manager it releases the step at its end."""

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

        With `put_as` the description has this name of the job, so the step is put under it.

        Raises:
            StoreNotFoundError: there is no such job, step or kept step.
            StoreError: the daemon refuses, or cannot be reached.
        """
        self.name = connection.address
        self._reader = StoreReaderSync(connection, job, step, Call(None, CONTROL_DEADLINE_SECONDS), kept=kept)
        # The leases that were requested, and the session in which they were requested.
        self._asked: deque[tuple[_Part, Any]] = deque()
        self._asked_in: StoreSession | None = None
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
        """Release the step."""
        self._forget_asked()
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

        While the caller uses a part, the store prepares the next ones.
        """
        part_bytes = self._reader.on_session(
            Call(None, CONTROL_DEADLINE_SECONDS),
            lambda session, _: max(READ_BLOCK_BYTES, min(PART_BYTES, session.arena_bytes // _ARENA_SHARE)),
        )
        waiting = iter([part for slab in slabs for part in _cut(slab, part_bytes)])
        wanted: deque[_Part] = deque()
        try:
            for slab in slabs:
                yield slab, self._parts(slab, waiting, wanted)
        finally:
            self._forget_asked()

    def _parts(self, slab: StoredSlab, waiting: Iterator[_Part], wanted: deque[_Part]) -> Iterator[torch.Tensor]:
        left = slab.size_bytes
        while left:
            data = self._next(waiting, wanted)
            left -= data.numel()
            yield data

    def _next(self, waiting: Iterator[_Part], wanted: deque[_Part]) -> torch.Tensor:
        """Return the bytes of the next part.

        `wanted` has the parts that must be requested again after the connection broke.
        """
        call = Call(None, LEASE_DEADLINE_SECONDS)

        def attempt(session: StoreSession, reader_id: int) -> torch.Tensor:
            if self._asked_in is not session:
                wanted.extendleft(part for part, _ in reversed(self._asked))
                self._forget_asked()
                self._asked_in = session
            while len(self._asked) < _PARTS_AHEAD:
                part = wanted.popleft() if wanted else next(waiting, None)
                if part is None:
                    break
                request = pb.AcquireLeasesRequest(wants=[part.to_want(reader_id)])
                self._asked.append((part, session.begin("AcquireLeases", request, LEASE_DEADLINE_SECONDS)))
            part, leased = self._asked[0]
            try:
                (lease,) = result_of(leased).leases
            except StoreError:
                # The next attempt requests this part and the following ones again, because a failed call cannot be
                # repeated.
                wanted.extendleft(part for part, _ in reversed(self._asked))
                self._forget_asked()
                raise
            data = torch.empty(lease.size_bytes, dtype=torch.uint8)
            session.copy_out(call, lease, data)
            release(session, [lease.lease_id])
            self._asked.popleft()
            return part.compact(data)

        return self._reader.on_session(call, attempt)

    def _forget_asked(self) -> None:
        """Release the leases that were requested, as soon as the daemon has granted them."""
        session, asked = self._asked_in, list(self._asked)
        self._asked.clear()
        for _, leased in asked if session is not None else ():
            leased.add_done_callback(lambda done: _release_granted(session, done))


def _release_granted(session: StoreSession | None, leased: Any) -> None:
    if session is not None and not leased.cancelled() and leased.exception() is None:
        release(session, [leased.result().leases[0].lease_id])


def digest_batches(slabs: Sequence[StoredSlab]) -> Iterator[list[StoredSlab]]:
    """Yield the slabs in batches that the store can digest within the deadline of one call."""
    batch: list[StoredSlab] = []
    size = 0
    for slab in slabs:
        if batch and (size + slab.lease_bytes > _DIGESTED_AT_ONCE_BYTES or len(batch) >= _MOST_RANGES):
            yield batch
            batch, size = [], 0
        batch.append(slab)
        size += slab.lease_bytes
    if batch:
        yield batch


def _cut(slab: StoredSlab, part_bytes: int) -> Iterator[_Part]:
    """Yield the parts of a slab. A shard that is larger than a part is divided into several parts."""
    most = part_bytes // slab.dtype.itemsize
    part, size = _Part(slab=slab), 0
    for shard in slab.group.shards:
        for first in range(0, shard.numel, most):
            count = min(most, shard.numel - first)
            # Each range of a lease begins at an aligned place, so it may take more bytes than it has.
            nbytes = round_up(count * slab.dtype.itemsize, GATHER_ALIGNMENT_BYTES)
            if part.ranges and (size + nbytes > part_bytes or len(part.ranges) >= _MOST_RANGES):
                yield part
                part, size = _Part(slab=slab), 0
            part.ranges.append(pb.TensorRange(fqn=shard.fqn, kind=slab.kind, offset=shard.offset + first, numel=count))
            size += nbytes
    if part.ranges:
        yield part
