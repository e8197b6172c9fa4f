"""A committed step as it is copied: everything that its store knows of it, and the form in which its bytes travel.

The bytes of a slab travel in *compact form*: the elements of the group's shards, by position, without the padding
between them. The digest of a slab is the XXH3-128 of its compact form, so it is the same in every store and in a
backup. This module owns no connection and no file.
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

# The name of a slab: its group's name and its kind.
SlabKey = tuple[str, int]

# The most bytes that a copy holds of a slab at once, and the most zeros that it writes at once.
PART_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class StoredSlab:
    """One kind of a group at a step.

    Attributes:
        group: the group, with its shards by position.
        kind: the kind.
        dtype: the type of its elements.
        version: the step that wrote the bytes. None: the bytes were never written, and are zeros.
    """

    group: pb.ShardGroup
    kind: kinds.Kind
    dtype: torch.dtype
    version: int | None

    @property
    def key(self) -> SlabKey:
        """The slab's name within its job."""
        return self.group.name, self.kind

    @cached_property
    def size_bytes(self) -> int:
        """The size of the compact form."""
        return sum(shard.numel for shard in self.group.shards) * self.dtype.itemsize

    @property
    def lease_bytes(self) -> int:
        """The size of a lease on the slab, which includes the padding between the shards."""
        return self.group.numel * self.dtype.itemsize

    def to_name(self) -> pb.SlabName:
        """Return the slab's name as the store's calls take it."""
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
        """Yield the bytes of a lease on the slab, as (first byte, bytes), from the parts of the compact form.

        The padding between the shards, and behind the last one, is zeros.

        Args:
            parts: the compact form, in order (uint8, on the CPU).
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
        step: the message with job, step, layout, world size, durability, time of the commit, and the ranks with client
            states.
        parameters: all parameters of the model, in the model's order.
        slabs: the stored slabs by name.
        client_states: the state that each rank of the node stored with the commit.
    """

    step: pb.DescribeStepResponse.StepOfJob
    parameters: Sequence[pb.Parameter]
    slabs: Mapping[SlabKey, StoredSlab]
    client_states: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """A text that names the commit. Another commit of the same number, as after a roll-back, has another text."""
        return f"step {self.step.step} of {self.step.committed_at_unix_seconds!r}"

    @property
    def size_bytes(self) -> int:
        """The bytes of all slabs that were written, in compact form."""
        return sum(slab.size_bytes for slab in self.slabs.values() if slab.version is not None)

    def groups(self) -> list[pb.ShardGroup]:
        """Return the groups, each once."""
        return list({name: slab.group for (name, _), slab in self.slabs.items()}.values())

    def has_groups_of(self, other: StepDescription) -> bool:
        """Return whether both have the same groups. The tiers of the groups may differ."""
        return self.slabs.keys() == other.slabs.keys() and all(
            _shape(slab.group) == _shape(other.slabs[key].group) for key, slab in self.slabs.items()
        )


def _shape(group: pb.ShardGroup) -> tuple[object, ...]:
    shards = [(shard.fqn, shard.offset, shard.numel, shard.position) for shard in group.shards]
    return group.numel, shards, sorted((spec.kind, spec.dtype) for spec in group.kinds)


def slabs_of(stored: Iterable[pb.DescribeStepResponse.StoredGroup]) -> dict[SlabKey, StoredSlab]:
    """Return the slabs of groups as a store describes them."""
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
    """The place from which a step is read: a daemon or a backup."""

    @property
    def name(self) -> str:
        """The name of the place, for people: a daemon's address, or a backup's directory or URL."""

    @property
    def description(self) -> StepDescription:
        """The step."""

    def digests(self, slabs: Sequence[StoredSlab]) -> list[bytes]:
        """Return the digest of each slab; b"" for one that was never written.

        Raises:
            StoreError, BackupError: the bytes cannot be read, or are damaged.
        """

    def read(self, slabs: Sequence[StoredSlab]) -> Iterator[tuple[StoredSlab, Iterator[torch.Tensor]]]:
        """Yield each slab with the parts of its compact form (uint8). Each slab's parts are taken before the next one.

        Raises:
            StoreError, BackupError: the bytes cannot be read, or are damaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgress:
    """The progress of a copy: the bytes that were sent or that the target had already, and all bytes of the step."""

    done_bytes: int
    total_bytes: int
