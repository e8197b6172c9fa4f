"""Jobs in memory, their pending and committed steps, and the versions that the retained steps need.

A step is *pending* while its updates run, then *committed*, and *durable* once the catalog has it. A committed step is
*retained* until every rank of the job has committed a newer one, so that the job can return to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from storage.base.errors import ConflictError, NotFoundError, OtherModelError
from storage.base.shard import GroupSpec, JobSpec, Kind, ParameterSpec
from storage.catalog.records import CommitRecord, RolledBack
from storage.state.shard_index import ShardIndex
from storage.state.slab import Group, Slab, Tally

# The most parameters that an error names of each kind of difference between two models, because the message of a gRPC
# status has room for few names.
_SHOWN = 3


@dataclass(slots=True, eq=False)
class PendingStep:
    """A job's step under way: the writes that belong to it, and the state of its commit."""

    step: int
    # The task that writes each slab in this step: the update of its group, or a put.
    writes: dict[Slab, asyncio.Task[None]] = field(default_factory=dict)
    # Set when every rank has voted for the step. From then on the step's commit is finished even if ranks die.
    sealed: asyncio.Event = field(default_factory=asyncio.Event)
    # This event is clear while a commit is under way, because the versions that the commit records must not be
    # discarded or replaced.
    at_rest: asyncio.Event = field(default_factory=asyncio.Event)
    # True as soon as the step is abandoned and its writes are being stopped.
    abandoned: bool = False

    def __post_init__(self) -> None:
        self.at_rest.set()

    @property
    def is_untouched(self) -> bool:
        """Whether the step has no writes and is not being committed, so that another step may take its place."""
        return not self.writes and not self.abandoned and self.at_rest.is_set()

    def check_open(self) -> None:
        """Raise ConflictError if the step is being committed or abandoned, so that no write can be added."""
        if self.abandoned or not self.at_rest.is_set():
            state = "abandoned" if self.abandoned else "committed"
            raise ConflictError(f"step {self.step} is being {state}; nothing can be added to it")


@dataclass(slots=True, eq=False)
class Job:
    """One layout of a job: its groups, its committed steps and its pending step. A job may have several layouts."""

    spec: JobSpec
    # The time of creation in seconds since 1970.
    created_at: float
    # The registered groups by name.
    groups: dict[str, Group] = field(default_factory=dict)
    # The index of the groups' shards by tensor, and the sums over the groups' slabs.
    index: ShardIndex = field(default_factory=ShardIndex)
    tally: Tally = field(default_factory=Tally)
    # This lock is held while groups are added, or compared with the registered ones, so that two registrations do not
    # mix.
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)
    # The committed steps to which the job can return, oldest first. The steps in `durable` are in the catalog.
    retained: dict[int, CommitRecord] = field(default_factory=dict)
    durable: set[int] = field(default_factory=set)
    # The roll-backs of this layout by operators, in their order. Each goes to a higher step than those before it.
    rolled_back: tuple[RolledBack, ...] = ()
    # The step under way, if one has begun.
    pending: PendingStep | None = None
    # The number of this layout's first commit. It is above 0 if the layout replaces an older one.
    first_step: int = 0
    # The layouts that this one has replaced, oldest first. Each is kept until every rank on every node has committed a
    # step in this layout.
    older: list[Job] = field(default_factory=list)
    # The layout that replaces this one, or that is being filled to do so.
    successor: Job | None = None
    # The newest step that every rank on every node is known to have committed, or None if none is known yet. It may be
    # above the steps that are retained, if bytes of this job were lost since.
    settled: int | None = None
    # Whether the run that made or settled the newest commit has ranks on other nodes, too.
    spans_nodes: bool = False
    # The snapshot that is being written or, if there is none, the last one; and the step whose versions it needs.
    snapshot: asyncio.Task[None] | None = None
    snapshot_step: int | None = None
    # This lock is held while the job returns to an earlier step, or is opened anew, so that no step is prepared or
    # committed meanwhile.
    rolling_back: asyncio.Lock = field(default_factory=asyncio.Lock)
    # This event is set when a step is committed or settled, when the ranks of a run have gone, and when the job is
    # deleted. Readers wait for it. `announce` then replaces it by a new event.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self) -> None:
        """Wake all tasks that wait for `changed`: the readers that wait for the next step."""
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    def note_settled(self, step: int | None) -> None:
        """Mark `step` as settled, because every rank on every node has committed it. None marks no step."""
        self.spans_nodes = self.spec.local_ranks < self.spec.world_size
        if step is not None:
            self.settled = step if self.settled is None else max(self.settled, step)

    def go_back_to(self, step: int) -> None:
        """Mark no step above `step` as settled any more, because a roll-back has given up these steps."""
        if self.settled is not None:
            self.settled = min(self.settled, step)

    @property
    def settled_step(self) -> int | None:
        """The newest step of the job that every rank on every node is known to have; None if none is known."""
        return None if self.settled is None else max((s for s in self.retained if s <= self.settled), default=None)

    def durable_everywhere(self, durable: Iterable[int]) -> int | None:
        """Return the newest of some durable steps that all nodes are known to have made durable; None if none is."""
        everywhere, every = self.settled, self.spec.durability.every_steps
        if everywhere is not None and self.spans_nodes and every > 1:
            # A step counts as durable on all nodes only if it is before the last settled step that a snapshot covers.
            # Another node may still be writing its snapshot of that settled step, but it has committed the step only
            # after its earlier snapshots were over.
            everywhere = everywhere // every * every - 1
        return None if everywhere is None else max((step for step in durable if step <= everywhere), default=None)

    @property
    def newest(self) -> int | None:
        """The newest committed step; None if there is none."""
        return max(self.retained, default=None)

    @property
    def next_step(self) -> int:
        """The lowest step that can be pending now. For a job without committed steps, it is the only one."""
        newest = self.newest
        return self.first_step if newest is None else newest + 1

    @property
    def begins_layout(self) -> bool:
        """Whether the layout is to replace an older one and has no commit yet."""
        return self.newest is None and self.first_step > 0

    @property
    def unfinished_successor(self) -> Job | None:
        """The layout that is to replace this one and has no commit yet; None if there is none."""
        return self.successor if self.successor is not None and self.successor.newest is None else None

    def slabs(self) -> Iterator[Slab]:
        """Return the slabs of all registered groups of this layout of the job."""
        return (slab for group in self.groups.values() for slab in group.slabs)

    def group(self, name: str) -> Group:
        """Return a registered group by its name.

        Raises:
            NotFoundError: the job has no such group.
        """
        if name not in self.groups:
            raise NotFoundError(f"job {self.spec.name!r} has no shard group {name!r}; register it first")
        return self.groups[name]

    def slab(self, group: str, kind: Kind) -> Slab:
        """Return the slab of one kind of a group.

        Raises:
            NotFoundError: the job has no such group, or the group does not have the kind.
        """
        return self.group(group).slab(kind, self.spec.name)

    def open_pending(self, step: int) -> PendingStep:
        """Return the pending step with this number, and begin it if none is pending.

        Step numbers may be skipped, because a trainer that keeps its states itself commits only some steps to the
        store.

        Raises:
            ConflictError: the step is not above the last committed one, or another step is under way.
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
    """Return the versions on NVMe that are not the newest and that no retained step needs."""
    if not slab.versions or (len(slab.versions) == 1 and slab.latest in slab.versions):
        return []
    needed = {slab.version_at(step) for step in retained} | {slab.latest}
    return [version for version in slab.versions if version not in needed]


def check_model(stored: JobSpec, wanted: JobSpec) -> None:
    """Check that a stored job can go on with a model, in the same or in a new layout.

    Raises:
        OtherModelError: the names or shapes of parameters differ; the message has the first ones.
        ConflictError: the durability differs.
    """
    name = stored.name
    if stored.model != wanted.model and (differences := _differences(stored, wanted)):
        raise OtherModelError(
            f"job {name!r} holds another model, so use another job name, or delete the job: {'; '.join(differences)}"
        )
    if stored.durability != wanted.durability:
        raise ConflictError(
            f"job {name!r} has durability {stored.durability} and this run asks for {wanted.durability}; "
            "keep the first, or use another job name"
        )


def _differences(stored: JobSpec, wanted: JobSpec) -> list[str]:
    """Return a text for each way in which names and shapes of the two models differ."""
    have, want = (
        {fqn: parameter for fqn, parameter in spec.model.by_name.items() if not parameter.has_buffers}
        for spec in (stored, wanted)
    )
    differences = []
    if new := [fqn for fqn in want if fqn not in have]:
        differences.append(f"{_named(new)} not in the stored job")
    if missing := [fqn for fqn in have if fqn not in want]:
        differences.append(f"{_named(missing)} not in this model")
    reshaped = [fqn for fqn in want if fqn in have and have[fqn].shape != want[fqn].shape]
    differences += [
        f"parameter {fqn!r} has shape {list(have[fqn].shape)} in the store and {list(want[fqn].shape)} in this model"
        for fqn in reshaped[:_SHOWN]
    ]
    if more := reshaped[_SHOWN:]:
        differences.append(f"{len(more)} more have other shapes")
    return differences


def _named(fqns: Sequence[str]) -> str:
    """Return the start of a sentence: "parameter 'a' is", or "parameters 'a', 'b', 'c' and 2 more are"."""
    shown = ", ".join(repr(fqn) for fqn in fqns[:_SHOWN])
    if len(fqns) == 1:
        return f"parameter {shown} is"
    more = f" and {len(fqns) - _SHOWN} more" if len(fqns) > _SHOWN else ""
    return f"parameters {shown}{more} are"


def check_layout(stored: JobSpec, wanted: JobSpec) -> None:
    """Check that a stored job can go on with a model and a world size in its present layout.

    Raises:
        ConflictError: the world size, a parameter or the durability differs; the message names the first difference.
    """
    if stored.world_size != wanted.world_size:
        raise ConflictError(
            f"job {stored.name!r} was stored by {stored.world_size} ranks and this run has {wanted.world_size}: start "
            f"{stored.world_size}, lay the job out anew (BeginLayout), or use another job name"
        )
    check_model(stored, wanted)
    if stored.model == wanted.model:
        return
    have, want = stored.model.by_name, wanted.model.by_name
    for fqn in dict.fromkeys([*want, *have]):
        if have.get(fqn) != want.get(fqn):
            raise _other_parameter(stored.name, fqn, have.get(fqn), want.get(fqn))


def _other_parameter(job: str, fqn: str, stored: ParameterSpec | None, wanted: ParameterSpec | None) -> ConflictError:
    return ConflictError(
        f"job {job!r} has another layout: parameter {fqn!r} is {_describe(stored)} in the store and "
        f"{_describe(wanted)} in this model; use another job name"
    )


def check_group(stored: GroupSpec, wanted: GroupSpec) -> None:
    """Check that a registration repeats a stored group: the same shards, kinds and types. Placements may differ.

    Raises:
        ConflictError: the registration differs from the stored group.
    """
    same_types = {k: (s.dtype, s.codec) for k, s in stored.slab_of_kind.items()} == {
        k: (s.dtype, s.codec) for k, s in wanted.slab_of_kind.items()
    }
    if stored.numel != wanted.numel or stored.shards != wanted.shards or not same_types:
        raise ConflictError(
            f"shard group {wanted.name!r} is stored with another layout or precision; use another job name"
        )


def _describe(parameter: ParameterSpec | None) -> str:
    if parameter is None:
        return "not there"
    frozen = "" if parameter.trainable else ", frozen"
    return f"{list(parameter.shape)} {parameter.dtype.value}{frozen}"
