"""Jobs, their steps, and which versions a set of retained steps needs.

A step is *pending* while its updates run, then *committed*, and durable when the catalog has it. The last committed
step stays until every rank of the job has committed the newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from storage.catalog.records import CommitRecord
from storage.errors import ConflictError, NotFoundError
from storage.shard import GroupSpec, JobSpec, Kind, ParameterSpec
from storage.shard_index import ShardIndex
from storage.slab import Group, Slab, Tally


@dataclass(slots=True, eq=False)
class PendingStep:
    """The step under way. `sealed` is set when every rank has voted for it: it will then be finished, whoever dies."""

    step: int
    # What writes each slab in this step: the update of its group, or a put.
    writes: dict[Slab, asyncio.Task[None]] = field(default_factory=dict)
    sealed: asyncio.Event = field(default_factory=asyncio.Event)
    # Clear while a commit is under way: what it records must be neither discarded nor replaced.
    at_rest: asyncio.Event = field(default_factory=asyncio.Event)
    # Its writes are being stopped.
    abandoned: bool = False

    def __post_init__(self) -> None:
        self.at_rest.set()

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of the step would be lost with it."""
        return not self.writes and not self.abandoned and self.at_rest.is_set()

    def check_open(self) -> None:
        """Raises ConflictError when nothing can become part of the step any more."""
        if self.abandoned or not self.at_rest.is_set():
            state = "abandoned" if self.abandoned else "committed"
            raise ConflictError(f"step {self.step} is being {state}; nothing can be added to it")


@dataclass(slots=True, eq=False)
class Job:
    """A job in memory."""

    spec: JobSpec
    created_at: float
    groups: dict[str, Group] = field(default_factory=dict)
    # Where the elements of each tensor are in them, and what their slabs have.
    index: ShardIndex = field(default_factory=ShardIndex)
    tally: Tally = field(default_factory=Tally)
    # Held while groups are added, or checked against those that are there.
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Committed steps that can be returned to, oldest first; those in `durable` are in the catalog.
    retained: dict[int, CommitRecord] = field(default_factory=dict)
    durable: set[int] = field(default_factory=set)
    pending: PendingStep | None = None
    # The number of the first commit in this layout: not 0 where another layout went before.
    first_step: int = 0
    # Layouts that this one has replaced, oldest first: kept until every rank, on every node, has committed this one.
    older: list[Job] = field(default_factory=list)
    # The layout that is being filled to replace this one, or has.
    successor: Job | None = None
    # The newest step that every rank of the job, on every node, has committed.
    settled: int = 0
    # The snapshot under way, or the last one, and the step whose versions it needs.
    snapshot: asyncio.Task[None] | None = None
    snapshot_step: int | None = None
    # Set, and replaced by another, when a step is committed and when the job is deleted; see `announce`.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self) -> None:
        """Wakes those who wait for the next step."""
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    @property
    def newest(self) -> int | None:
        """The newest committed step."""
        return max(self.retained, default=None)

    @property
    def next_step(self) -> int:
        """The lowest step that can be prepared now; for a job without steps the only one."""
        newest = self.newest
        return self.first_step if newest is None else newest + 1

    @property
    def begins_layout(self) -> bool:
        """Whether it goes on from the steps of another layout and has no commit yet."""
        return self.newest is None and self.first_step > 0

    @property
    def unfinished_successor(self) -> Job | None:
        """The layout that is to replace this one and has no commit yet."""
        return self.successor if self.successor is not None and self.successor.newest is None else None

    def slabs(self) -> Iterator[Slab]:
        """All slabs of the job."""
        return (slab for group in self.groups.values() for slab in group.slabs)

    def group(self, name: str) -> Group:
        """Raises NotFoundError, naming the job, for an unknown group."""
        if name not in self.groups:
            raise NotFoundError(f"job {self.spec.name!r} has no shard group {name!r}; register it first")
        return self.groups[name]

    def slab(self, group: str, kind: Kind) -> Slab:
        """Raises NotFoundError for an unknown group, or a kind that it does not have."""
        return self.group(group).slab(kind, self.spec.name)

    def open_pending(self, step: int) -> PendingStep:
        """The step under way, begun if need be. Steps may be left out: who keeps states itself hands over some only.

        Raises:
            ConflictError: the step is not above the last committed one, or another one is under way.
        """
        if step < self.next_step or (self.newest is None and step != self.first_step):
            raise ConflictError(
                f"job {self.spec.name!r}: step {step} cannot be prepared, the next one is {self.next_step}; "
                "resume from the last committed step"
            )
        pending = self.pending
        if pending is None or (pending.step != step and pending.is_untouched):
            pending = self.pending = PendingStep(step)
        if pending.step != step:
            raise ConflictError(
                f"job {self.spec.name!r}: step {step} cannot be prepared, step {pending.step} is under way; "
                "commit that one, or resume from the last committed step"
            )
        return pending


def unneeded_versions(slab: Slab, retained: Iterable[int]) -> list[int]:
    """Versions on NVMe that no retained step sees and that are not the newest."""
    if not slab.versions or (len(slab.versions) == 1 and slab.latest in slab.versions):
        return []
    needed = {slab.version_at(step) for step in retained} | {slab.latest}
    return [version for version in slab.versions if version not in needed]


def check_model(stored: JobSpec, wanted: JobSpec) -> None:
    """Raises ConflictError, naming the first difference, unless the job can go on with that model in some layout."""
    name = stored.name
    have, want = stored.model.by_name, wanted.model.by_name
    for fqn in [*want, *have] if stored.model != wanted.model else ():
        if fqn not in have or fqn not in want:
            where = "the stored job" if fqn not in have else "this model"
            raise ConflictError(
                f"job {name!r} has another layout: parameter {fqn!r} is not in {where}; use another job name"
            )
        if have[fqn].shape != want[fqn].shape:
            raise _other_parameter(name, have[fqn], want[fqn])
    if stored.durability != wanted.durability:
        raise ConflictError(
            f"job {name!r} has durability {stored.durability} and this run asks for {wanted.durability}; "
            "keep the first, or use another job name"
        )


def check_layout(stored: JobSpec, wanted: JobSpec) -> None:
    """Raises ConflictError, naming the first difference, unless the job can go on as it is stored."""
    if stored.world_size != wanted.world_size:
        raise ConflictError(
            f"job {stored.name!r} was stored by {stored.world_size} ranks and this run has {wanted.world_size}: start "
            f"{stored.world_size}, lay the job out anew (BeginLayout), or use another job name"
        )
    check_model(stored, wanted)
    have = stored.model.by_name
    for parameter in wanted.parameters if stored.model != wanted.model else ():
        if have[parameter.fqn] != parameter:
            raise _other_parameter(stored.name, have[parameter.fqn], parameter)


def _other_parameter(job: str, stored: ParameterSpec, wanted: ParameterSpec) -> ConflictError:
    return ConflictError(
        f"job {job!r} has another layout: parameter {wanted.fqn!r} is {_describe(stored)} in the store and "
        f"{_describe(wanted)} in this model; use another job name"
    )


def check_group(stored: GroupSpec, wanted: GroupSpec) -> None:
    """Raises ConflictError unless both hold the same shards in the same kinds and types; placements may differ."""
    same_types = {k: s.dtype for k, s in stored.slab_of_kind.items()} == {
        k: s.dtype for k, s in wanted.slab_of_kind.items()
    }
    if stored.numel != wanted.numel or stored.shards != wanted.shards or not same_types:
        raise ConflictError(
            f"shard group {wanted.name!r} is stored with another layout or precision; use another job name"
        )


def _describe(parameter: ParameterSpec) -> str:
    frozen = "" if parameter.trainable else ", frozen"
    return f"{list(parameter.shape)} {parameter.dtype.value}{frozen}"
