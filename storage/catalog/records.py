"""What the catalog holds, as values; and the layout of a job as the text that the catalog keeps of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.shard import DType, GroupSpec, JobSpec, ParameterSpec, Shard, SlabKey
from storage.tiers.extents import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One committed step of a job; `client_states` by rank."""

    step: int
    committed_at: float
    client_states: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Where the bytes of one version of a slab are, and their checksums (see integrity.py)."""

    extents: tuple[Extent, ...]
    checksums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """All that the catalog knows of a job. `versions`: where each slab's bytes are, by step."""

    spec: JobSpec
    created_at: float
    groups: tuple[GroupSpec, ...]
    commits: tuple[CommitRecord, ...]
    versions: Mapping[SlabKey, Mapping[int, StoredVersion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadExtent:
    """Bytes of a data file that must not be used any more; `found_at` in seconds since 1970."""

    extent: Extent
    reason: str
    found_at: float


def parameters_to_text(parameters: Sequence[ParameterSpec]) -> str:
    """JSON: a list of [fqn, shape, dtype, trainable]."""
    return _json_list([p.fqn, list(p.shape), p.dtype.value, p.trainable] for p in parameters)


def parameters_from_text(text: str) -> tuple[ParameterSpec, ...]:
    """Raises ValueError or TypeError for anything else than `parameters_to_text` gave."""
    return tuple(
        ParameterSpec(fqn=fqn, shape=tuple(shape), dtype=DType(dtype), trainable=trainable)
        for fqn, shape, dtype, trainable in json.loads(text)
    )


def shards_to_text(shards: Sequence[Shard]) -> str:
    """JSON: a list of [fqn, offset, numel, position], in elements."""
    return _json_list([s.fqn, s.offset, s.numel, s.position] for s in shards)


def _json_list(items: Iterable[Sequence[object]]) -> str:
    """Return what `json.dumps` gives for a list of the items.

    One call for all of a large model would keep the interpreter's lock for tenths of a second, and with it the event
    loop, on whatever thread it is made.
    """
    return f"[{', '.join(map(json.dumps, items))}]"


def shards_from_text(text: str) -> tuple[Shard, ...]:
    """Raises ValueError or TypeError for anything else than `shards_to_text` gave."""
    return tuple(
        Shard(fqn=fqn, offset=offset, numel=numel, position=position)
        for fqn, offset, numel, position in json.loads(text)
    )
