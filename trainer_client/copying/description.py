"""A committed step as it is copied: all that its store knows of the step, and the form in which its bytes travel.

The bytes of a slab travel in *compact form*: the elements of the group's shards, in the order of their positions,
without the padding between the shards. The digest of a slab is the XXH3-128 of its compact form, so it is the same in
every store and in a backup. This module owns no connection and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from paramserver.contract import kinds
from paramserver.contract.dtypes import TORCH_DTYPES
from paramserver.v1 import parameter_store_pb2 as pb

# The name of a slab: the name of its shard group and the number of its kind.
SlabKey = tuple[str, int]

# A slab is copied in parts of at most this size. Padding (zeros) is written in pieces of at most this size, too.
PART_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class StoredSlab:
    """A slab of a committed step that is copied: the bytes of one kind of one shard group.

    Attributes:
        group: the group, with its shards in the order of their positions.
        kind: the kind.
        dtype: the type of its elements.
        version: the step that wrote the bytes. None: no step has written the slab, so its bytes are zeros.
    """

    group: pb.ShardGroup
    kind: kinds.Kind
    dtype: torch.dtype
    version: int | None

    @property
    def key(self) -> SlabKey:
        """The slab's name within its job: the name of its group, and its kind."""
        return self.group.name, self.kind

    @cached_property
    def size_bytes(self) -> int:
        """The size of the slab's compact form."""
        return sum(shard.numel for shard in self.group.shards) * self.dtype.itemsize

    @property
    def lease_bytes(self) -> int:
        """The size of a lease on the slab, which includes the padding between the shards."""
        return self.group.numel * self.dtype.itemsize

    def to_name(self) -> pb.SlabName:
        """Return the slab's name as a message, for the daemon's calls that take a slab."""
        return pb.SlabName(group=self.group.name, kind=self.kind)

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        """For each shard: its first byte and its end in the compact form, and its first byte in the lease."""
        spans, start = [], 0
        for shard in self.group.shards:
            end = start + shard.numel * self.dtype.itemsize
            spans.append((start, end, shard.position * self.dtype.itemsize))
            start = end
        return spans

    def expand(self, parts: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the bytes for a lease on the slab, as (place of the first byte in the lease, bytes).

        The padding between the shards, and after the last shard, is filled with zeros.

        Args:
            parts: the parts of the slab's compact form, in order (uint8, on the CPU).
        """
        at = compact = 0
        spans = iter(self._spans)
        start, end, place = next(spans, (0, 0, 0))
        for part in parts:
            used = 0
            while used < part.numel():
                if compact == end:
                    start, end, place = next(spans)
                if (target := place + compact - start) > at:
                    yield from _zeros(at, target)
                    at = target
                count = min(end - compact, part.numel() - used)
                yield at, part[used : used + count]
                at, compact, used = at + count, compact + count, used + count
        yield from _zeros(at, self.lease_bytes)


def _zeros(start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    for at in range(start, end, PART_BYTES):
        yield at, torch.zeros(min(PART_BYTES, end - at), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDescription:
    """A committed step of a job, as one store has it: the shards of the ranks of the store's node.

    Attributes:
        step: the daemon's message with the job, the step's number, the layout, the world size, the durability, the time
            of the commit, and the ranks that have a client state.
        parameters: all parameters of the model, in the model's order.
        slabs: the stored slabs by name.
        client_states: the client state that each rank of the node stored with the commit, by rank.
    """

    step: pb.DescribeStepResponse.StepOfJob
    parameters: Sequence[pb.Parameter]
    slabs: Mapping[SlabKey, StoredSlab]
    client_states: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """A text that names the commit. After a roll-back, a new commit with the same number has another text."""
        return f"step {self.step.step} of {self.step.committed_at_unix_seconds!r}"

    @property
    def size_bytes(self) -> int:
        """The size of all slabs that a step has written, in compact form."""
        return sum(slab.size_bytes for slab in self.slabs.values() if slab.version is not None)

    def groups(self) -> list[pb.ShardGroup]:
        """Return the shard groups of the step, each once although a group has several slabs."""
        return list({name: slab.group for (name, _), slab in self.slabs.items()}.values())

    def has_groups_of(self, other: StepDescription) -> bool:
        """Return whether both steps have the same groups of the same shards. The groups' tiers may differ."""
        return self.slabs.keys() == other.slabs.keys() and all(
            _shape(slab.group) == _shape(other.slabs[key].group) for key, slab in self.slabs.items()
        )


def _shape(group: pb.ShardGroup) -> tuple[object, ...]:
    shards = [(shard.fqn, shard.offset, shard.numel, shard.position) for shard in group.shards]
    return group.numel, shards, sorted((spec.kind, spec.dtype) for spec in group.kinds)


def slabs_of(stored: Iterable[pb.DescribeStepResponse.StoredGroup]) -> dict[SlabKey, StoredSlab]:
    """Return the slabs of the groups in a store's answers to DescribeStep, by name."""
    slabs: dict[SlabKey, StoredSlab] = {}
    for one in stored:
        dtypes = {spec.kind: TORCH_DTYPES[spec.dtype] for spec in one.group.kinds}
        for version in one.versions:
            slab = StoredSlab(
                group=one.group,
                kind=version.kind,
                dtype=dtypes[version.kind],
                version=version.version if version.HasField("version") else None,
            )
            slabs[slab.key] = slab
    return slabs


class StepSource(Protocol):
    """The interface of the places from which a step is copied: `DaemonStep` (a daemon) and `BackupStep` (a backup)."""

    @property
    def name(self) -> str:
        """The name of the place, for people: a daemon's address, or a backup's directory or URL."""

    @property
    def description(self) -> StepDescription:
        """All that the place knows of the step besides the bytes of its slabs: shards, versions, client states."""

    def digests(self, slabs: Sequence[StoredSlab]) -> list[bytes]:
        """Return the digest of each slab's compact form; b"" for a slab that was never written.

        Raises:
            StoreError, BackupError: the bytes cannot be read, or are damaged.
        """

    def read(self, slabs: Sequence[StoredSlab]) -> Iterator[tuple[StoredSlab, Iterator[torch.Tensor]]]:
        """Yield each slab with an iterator over its bytes: the parts (uint8) of its compact form.

        The caller must use up the parts of one slab before it asks for the next slab, because all iterators read from
        one stream of bytes.

        Raises:
            StoreError, BackupError: the bytes cannot be read, or are damaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgress:
    """The progress of a copy: the bytes that were sent or that the target had already, and all bytes of the step."""

    done_bytes: int
    total_bytes: int
