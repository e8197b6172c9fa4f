"""The ledger: the catalog's contents in memory without the bulk, and the digests of each commit, each job and of all.

The bulk (packed manifests, client states) stays in the database; the ledger has its checksums. Ledgers are immutable,
so a transaction that fails returns to the ledger with which it began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from storage.base.shard import Kind
from storage.catalog.digest import digest, digest_of_rows
from storage.catalog.manifest import SlabIds
from storage.catalog.records import BadExtent

# The kind for each word of the column `kind` in the table `slabs`. A look-up in this dictionary takes a fraction of the
# time of `Kind(word)`.
KINDS = {kind.value: kind for kind in Kind}

# A row of the table `jobs`: name, world size, steps between durable commits, parameters, time of creation.
JobRow = tuple[str, int, int, str, float]
# A row of the table `groups`: id, name, number of elements, shards.
GroupRow = tuple[int, str, int, str]
# A row of the table `slabs`: id, id of the group, kind, element type, placement.
SlabRow = tuple[int, int, str, str, str, str | None]


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The ledger's entry of one manifest: the ids of the manifest's slabs, and the checksum of its packed bytes."""

    slabs: SlabIds
    checksum: bytes


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """The ledger's entry of one committed step; `states` is the digest of the step's client states."""

    committed_at: float
    states: bytes
    digest: bytes = b""


@dataclass(frozen=True)
class LayoutEntry:
    """The ledger's rows of the groups and slabs of one job. Groups and slabs have ids that other rows refer to."""

    groups: tuple[GroupRow, ...]
    slabs: tuple[SlabRow, ...]

    @cached_property
    def digest(self) -> bytes:
        """The digest of all rows of the layout."""
        # The row of a plain slab, which has no codec, counts as in format 5, so that this code verifies catalogs of
        # format 5, too.
        slabs = (row if row[-1] is not None else row[:-1] for row in self.slabs)
        return digest([digest_of_rows(self.groups), digest_of_rows(slabs)])

    @cached_property
    def slab_ids(self) -> Mapping[tuple[str, Kind], int]:
        """The id of each slab by group name and kind.

        Read this only after the digests of the rows were verified, because a damaged row raises KeyError here.
        """
        names = {group: name for group, name, *_ in self.groups}
        return {(names[group], KINDS[kind]): slab for slab, group, kind, *_ in self.slabs}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """The ledger's entry of one job, with the entries of its commits and manifests by step.

    `settled` is the newest commit that all nodes are known to have, and None if none is known.
    """

    id: int
    row: JobRow
    layout: LayoutEntry
    settled: int | None = None
    commits: Mapping[int, CommitEntry] = field(default_factory=dict)
    manifests: Mapping[int, ManifestEntry] = field(default_factory=dict)
    digest: bytes = b""

    @property
    def name(self) -> str:
        """The identity of the job, unique in the catalog."""
        return self.row[0]

    def sealed(self) -> JobEntry:
        """Return a copy of the entry in which all digests are computed from the contents."""
        row = digest(self.row)
        commits = {
            # A commit's digest covers everything that a reader of the step relies on.
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
        # For a job without a settled step, the digest is computed as in format 5, so that this code verifies catalogs
        # of format 5, too.
        settled = [] if self.settled is None else [self.settled]
        return replace(self, commits=commits, digest=digest([row, self.layout.digest, steps, manifests, *settled]))

    def _manifests_until(self, step: int) -> bytes:
        return digest_of_rows((s, entry.checksum) for s, entry in sorted(self.manifests.items()) if s <= step)


@dataclass(frozen=True)
class BadExtentList:
    """The ledger's entry of the damaged extents that must not be used any more, ordered by file and offset."""

    extents: tuple[BadExtent, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """The digest of all rows of the list."""
        return digest_of_rows(
            (b.extent.file, b.extent.offset, b.extent.nbytes, b.reason, b.found_at) for b in self.extents
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The contents of the whole catalog in memory, as one immutable object; each transaction makes a new one.

    Attributes:
        meta: the rows of the table `meta` as pairs of key and value, without the row of the digest.
        files: the directory of each data file, by its number.
        bad_extents: the extents that must not be used any more.
        jobs: the jobs by identity.
    """

    meta: tuple[tuple[str, str], ...] = ()
    files: Mapping[int, str] = field(default_factory=dict)
    bad_extents: BadExtentList = field(default_factory=BadExtentList)
    jobs: Mapping[str, JobEntry] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """The digest that covers every row of every table."""
        files = digest_of_rows(sorted(self.files.items()))
        jobs = digest_of_rows((name, job.digest) for name, job in sorted(self.jobs.items()))
        return digest([digest_of_rows(self.meta), files, self.bad_extents.digest, jobs])

    def with_job(self, job: JobEntry) -> Ledger:
        """Return a copy of the ledger with this job, in place of the job of the same identity if there is one."""
        return replace(self, jobs={**self.jobs, job.name: job})

    def without_job(self, name: str) -> Ledger:
        """Return a copy of the ledger without the job of this identity."""
        return replace(self, jobs={other: job for other, job in self.jobs.items() if other != name})
