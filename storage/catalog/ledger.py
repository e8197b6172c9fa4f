"""What the catalog says, in memory and without the bulk, and the digests that prove it: of commits, of jobs, of all.

Values that are never changed, only replaced: a transaction that fails goes back to the ledger that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from storage.catalog.digest import digest, digest_of_rows
from storage.catalog.manifest import SlabIds
from storage.catalog.records import BadExtent
from storage.shard import Kind

# Name, world size, steps between durable commits, parameters, time of creation.
JobRow = tuple[str, int, int, str, float]
# Id, name, elements, shards.
GroupRow = tuple[int, str, int, str]
# Id, id of the group, kind, element type, placement.
SlabRow = tuple[int, int, str, str, str]


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The slabs of a manifest, and its checksum."""

    slabs: SlabIds
    checksum: bytes


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """A committed step; `states`: the digest of its client states."""

    committed_at: float
    states: bytes
    digest: bytes = b""


@dataclass(frozen=True)
class LayoutEntry:
    """The groups and slabs of a job, by id."""

    groups: tuple[GroupRow, ...]
    slabs: tuple[SlabRow, ...]

    @cached_property
    def digest(self) -> bytes:
        """Of all rows."""
        return digest([digest_of_rows(self.groups), digest_of_rows(self.slabs)])

    @cached_property
    def slab_ids(self) -> Mapping[tuple[str, Kind], int]:
        """By group and kind; for rows that were verified."""
        names = {group: name for group, name, *_ in self.groups}
        return {(names[group], Kind(kind)): slab for slab, group, kind, *_ in self.slabs}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """A job, its commits and manifests by step."""

    id: int
    row: JobRow
    layout: LayoutEntry
    commits: Mapping[int, CommitEntry] = field(default_factory=dict)
    manifests: Mapping[int, ManifestEntry] = field(default_factory=dict)
    digest: bytes = b""

    @property
    def name(self) -> str:
        """Unique in the catalog."""
        return self.row[0]

    def sealed(self) -> JobEntry:
        """The same with the digests that it should have."""
        row = digest(self.row)
        commits = {
            # Of everything that a reader of the step relies on.
            step: replace(
                commit,
                digest=digest(
                    [row, self.layout.digest, step, commit.committed_at, commit.states, self._manifests_until(step)]
                ),
            )
            for step, commit in sorted(self.commits.items())
        }
        steps = digest_of_rows((step, commit.digest) for step, commit in commits.items())
        manifests = self._manifests_until(max(self.manifests, default=0))
        return replace(self, commits=commits, digest=digest([row, self.layout.digest, steps, manifests]))

    def _manifests_until(self, step: int) -> bytes:
        return digest_of_rows((s, entry.checksum) for s, entry in sorted(self.manifests.items()) if s <= step)


@dataclass(frozen=True)
class BadExtentList:
    """What must not be used any more, by file and offset."""

    extents: tuple[BadExtent, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """Of all rows."""
        return digest_of_rows(
            (b.extent.file, b.extent.offset, b.extent.nbytes, b.reason, b.found_at) for b in self.extents
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All of it. `meta`: key and value, without the digest; `files`: directories by id; `jobs` by name."""

    meta: tuple[tuple[str, str], ...] = ()
    files: Mapping[int, str] = field(default_factory=dict)
    bad_extents: BadExtentList = field(default_factory=BadExtentList)
    jobs: Mapping[str, JobEntry] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """Of every row of every table."""
        files = digest_of_rows(sorted(self.files.items()))
        jobs = digest_of_rows((name, job.digest) for name, job in sorted(self.jobs.items()))
        return digest([digest_of_rows(self.meta), files, self.bad_extents.digest, jobs])

    def with_job(self, job: JobEntry) -> Ledger:
        """The same with this job in place of the one of its name, if any."""
        return replace(self, jobs={**self.jobs, job.name: job})

    def without_job(self, name: str) -> Ledger:
        """The same without this job."""
        return replace(self, jobs={other: job for other, job in self.jobs.items() if other != name})
