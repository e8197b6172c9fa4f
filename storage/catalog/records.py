"""The records that the catalog returns, and the text form in which it keeps the parameters and shards of a job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.base.shard import DType, GroupSpec, JobSpec, ParameterSpec, Shard, SlabKey
from storage.tiers.extents import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One committed step of a job. `client_states` maps ranks to their bytes; `committed_at` is seconds since 1970."""

    step: int
    committed_at: float
    client_states: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The place of one version of a slab, and the checksums of its blocks (see integrity.py)."""

    extents: tuple[Extent, ...]
    checksums: bytes


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A roll-back by an operator: `step` became the newest one again. `name` is random and names this roll-back.

    Daemons on other nodes may still have newer steps, which were made before the roll-back and which the operator has
    given up. By the name, clients tell these steps from steps that were made after the roll-back, see
    trainer_client/training/run/rolled_back.py.
    """

    step: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the catalog has it. `Catalog.load` returns these records, and the engine makes its jobs of them.

    Attributes:
        spec: the job's specification, without ranks, because no run is attached to the job yet.
        created_at: the time of creation in seconds since 1970.
        groups: its groups.
        commits: its commits, oldest first.
        versions: the versions of each slab by the step that wrote them.
        settled: the newest of the commits that all nodes of the job are known to have; None if no such one is known.
        rolled_back: the roll-backs by operators.
    """

    spec: JobSpec
    created_at: float
    groups: tuple[GroupSpec, ...]
    commits: tuple[CommitRecord, ...]
    versions: Mapping[SlabKey, Mapping[int, StoredVersion]]
    settled: int | None = None
    rolled_back: tuple[RolledBack, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BadExtent:
    """An extent of a data file that is damaged and never used again; `found_at` is in seconds since 1970."""

    extent: Extent
    reason: str
    found_at: float


def rolled_back_to_text(marks: Sequence[RolledBack]) -> str:
    """Return roll-backs as JSON: a list of [step, name]."""
    return _json_list([mark.step, mark.name] for mark in marks)


def rolled_back_from_text(text: str) -> tuple[RolledBack, ...]:
    """Return the roll-backs from a text that `rolled_back_to_text` made.

    Raises:
        ValueError, TypeError: the text is not of that form.
    """
    return tuple(RolledBack(step, name) for step, name in json.loads(text))


def parameters_to_text(parameters: Sequence[ParameterSpec]) -> str:
    """Return the parameters as JSON: a list of [fqn, shape, dtype, trainable]."""
    return _json_list([p.fqn, list(p.shape), p.dtype.value, p.trainable] for p in parameters)


def parameters_from_text(text: str) -> tuple[ParameterSpec, ...]:
    """Return the parameters from a text that `parameters_to_text` made.

    Raises:
        ValueError, TypeError: the text is not of that form.
    """
    return tuple(
        ParameterSpec(fqn=fqn, shape=tuple(shape), dtype=DType(dtype), trainable=trainable)
        for fqn, shape, dtype, trainable in json.loads(text)
    )


def shards_to_text(shards: Sequence[Shard]) -> str:
    """Return the shards as JSON: a list of [fqn, offset, numel, position in the group], in elements."""
    return _json_list([s.fqn, s.offset, s.numel, s.group_offset] for s in shards)


def _json_list(items: Iterable[Sequence[object]]) -> str:
    """Return what `json.dumps` returns for a list of the items, with one call per item.

    One call for all shards of a large model would hold the interpreter's lock for tenths of a second. That blocks the
    event loop even if the call is made on another thread.
    """
    return f"[{', '.join(map(json.dumps, items))}]"


def shards_from_text(text: str) -> tuple[Shard, ...]:
    """Return the shards from a text that `shards_to_text` made.

    Raises:
        ValueError, TypeError: the text is not of that form.
    """
    return tuple(
        Shard(fqn=fqn, offset=offset, numel=numel, group_offset=group_offset)
        for fqn, offset, numel, group_offset in json.loads(text)
    )
