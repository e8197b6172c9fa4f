"""Reader of the catalog. It verifies every row by the digests before it returns anything made of the row."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.base.codec import PLAIN, codecs_named
from storage.base.errors import DataLossError
from storage.base.shard import LAYOUT_SEPARATOR, DType, Durability, GroupSpec, JobSpec, SlabKey, SlabSpec, TierName
from storage.catalog.digest import digest, digest_of_rows
from storage.catalog.ledger import KINDS, BadExtentList, CommitEntry, JobEntry, LayoutEntry, Ledger, ManifestEntry
from storage.catalog.manifest import Manifest, visible_entries
from storage.catalog.records import (
    BadExtent,
    CommitRecord,
    JobRecord,
    StoredVersion,
    parameters_from_text,
    shards_from_text,
)
from storage.catalog.tables import REMEDY
from storage.tiers.extents import Extent

# The element types and tiers by their words in the catalog. They are dictionaries because a call such as `DType(word)`
# takes several times as long as a look-up, and the reader converts four words for each slab.
_DTYPES = {dtype.value: dtype for dtype in DType}
_TIERS = {tier.value: tier for tier in TierName}


@dataclass(frozen=True, slots=True)
class VerifiedJob:
    """A job whose digests match, with its packed manifests by step, and its client states by step and rank."""

    entry: JobEntry
    manifests: Mapping[int, bytes]
    states: Mapping[int, Mapping[int, bytes]]

    def stored(self) -> JobRecord:
        """Return the job as a JobRecord.

        Raises:
            NewerFormatError: a slab has a codec that is not known here.
            LookupError, TypeError, ValueError: the rows are as they were written, but do not describe a valid job.
        """
        identity, world_size, every_steps, parameters, created_at = self.entry.row
        # The parts of an identity are the names of the job and of its layout, and for a kept step also its own name and
        # its note. A part that an identity does not have is "".
        name, layout, kept, note = (*identity.split(LAYOUT_SEPARATOR), "", "", "")[:4]
        spec = JobSpec(
            name=name,
            layout=layout,
            kept=kept,
            note=note,
            world_size=world_size,
            local_ranks=0,
            durability=Durability(every_steps=every_steps),
            parameters=parameters_from_text(parameters),
        )
        commits = tuple(
            CommitRecord(step=step, committed_at=commit.committed_at, client_states=self.states.get(step, {}))
            for step, commit in self.entry.commits.items()
        )
        return JobRecord(
            spec=spec,
            created_at=created_at,
            groups=self._groups(),
            commits=commits,
            versions=self._versions(spec.identity),
            settled=self.entry.settled,
        )

    def _groups(self) -> tuple[GroupSpec, ...]:
        slabs: dict[int, list[SlabSpec]] = {}
        for _, group, kind, dtype, placement, codec in self.entry.layout.slabs:
            if codec is not None:
                codecs_named(codec)
            slabs.setdefault(group, []).append(
                SlabSpec(kind=KINDS[kind], dtype=_DTYPES[dtype], placement=_TIERS[placement], codec=codec or PLAIN)
            )
        return tuple(
            GroupSpec(name=name, numel=numel, shards=shards_from_text(shards), slabs=tuple(slabs[group]))
            for group, name, numel, shards in self.entry.layout.groups
        )

    def _versions(self, identity: str) -> dict[SlabKey, dict[int, StoredVersion]]:
        """Return the versions that some commit needs, by slab and step; the slabs are those of the layout `identity`.

        Other entries of the manifests are skipped, because their extents are free or hold other versions by now.
        """
        keys = {slab: SlabKey(identity, *names) for names, slab in self.entry.layout.slab_ids.items()}
        slabs = {step: manifest.slabs for step, manifest in self.entry.manifests.items()}
        versions: dict[SlabKey, dict[int, StoredVersion]] = {}
        for step, mask in visible_entries(slabs, self.entry.commits).items():
            for slab, version in Manifest.unpack(self.manifests[step]).only(mask).versions():
                versions.setdefault(keys[slab], {})[step] = version
        return versions


def read_ledger(db: sqlite3.Connection, path: Path, on_job: Callable[[VerifiedJob], object] = lambda _: None) -> Ledger:
    """Return the catalog, verified, without its packed manifests and client states.

    Args:
        on_job: called with each job, its packed manifests and its client states, once the job's own digests have been
            verified.

    Raises:
        DataLossError: a digest does not match the rows. The message names the job and the step if they are known.
    """
    meta = dict(db.execute("SELECT key, value FROM meta ORDER BY key"))
    written = meta.pop("digest", None)
    jobs: dict[str, JobEntry] = {}
    for job in read_jobs(db, path):
        jobs[job.entry.name] = job.entry
        on_job(job)
    ledger = Ledger(
        meta=tuple(meta.items()),
        files=dict(db.execute("SELECT id, directory FROM files")),
        bad_extents=BadExtentList(
            tuple(
                BadExtent(extent=Extent(offset, nbytes, file), reason=reason, found_at=found_at)
                for file, offset, nbytes, reason, found_at in db.execute(
                    "SELECT file, offset, nbytes, reason, found_at FROM bad_extents ORDER BY file, offset"
                )
            )
        ),
        jobs=jobs,
    )
    if ledger.digest.hex() != written:
        raise _damaged(path, "the list of its jobs, data files and bad extents")
    return ledger


def read_jobs(db: sqlite3.Connection, path: Path) -> Iterator[VerifiedJob]:
    """Yield every job, one at a time, after its digests have been verified.

    Raises:
        DataLossError: a digest does not match. The message names the job, and the step if it is known.
    """
    for job_id, *row, settled, written in db.execute(
        "SELECT id, name, world_size, every_steps, parameters, created_at, settled, digest FROM jobs ORDER BY id"
    ):
        name, world_size, every_steps, parameters, created_at = row
        manifests, entries = _read_manifests(db, path, job_id, name)
        states = _read_states(db, job_id)
        entry = JobEntry(
            id=job_id,
            row=(name, world_size, every_steps, parameters, created_at),
            layout=_read_layout(db, job_id),
            settled=settled,
            commits=_read_commits(db, job_id, states),
            manifests=entries,
            digest=written,
        )
        sealed = entry.sealed()
        for step, commit in entry.commits.items():
            if commit != sealed.commits[step]:
                raise _damaged(path, f"job {name!r}, step {step},")
        if entry.digest != sealed.digest:
            raise _damaged(path, f"the list of the steps of job {name!r}")
        yield VerifiedJob(entry, manifests, states)


def checksum_of_manifest(job: str, step: int, packed: bytes) -> bytes:
    """Return the checksum of a packed manifest.

    The checksum also covers the job and the step, so an intact manifest in the row of another job or step does not
    match.
    """
    return digest([job, step, packed])


def digest_of_states(states: Mapping[int, bytes]) -> bytes:
    """Return the digest of the client states of one step, given by rank."""
    return digest_of_rows(sorted(states.items()))


def _read_manifests(
    db: sqlite3.Connection, path: Path, job_id: int, name: str
) -> tuple[dict[int, bytes], dict[int, ManifestEntry]]:
    packed: dict[int, bytes] = {}
    entries: dict[int, ManifestEntry] = {}
    for step, data, checksum in db.execute(
        "SELECT step, entries, checksum FROM manifests WHERE job = ? ORDER BY step", (job_id,)
    ):
        if checksum_of_manifest(name, step, data) != checksum:
            raise _damaged(path, f"what step {step} of job {name!r} wrote")
        packed[step] = data
        entries[step] = ManifestEntry(Manifest.unpack(data).slabs, checksum)
    return packed, entries


def _read_states(db: sqlite3.Connection, job_id: int) -> dict[int, dict[int, bytes]]:
    states: dict[int, dict[int, bytes]] = {}
    for step, rank, state in db.execute(
        "SELECT step, rank, state FROM client_states WHERE job = ? ORDER BY step, rank", (job_id,)
    ):
        states.setdefault(step, {})[rank] = state
    return states


def _read_commits(
    db: sqlite3.Connection, job_id: int, states: Mapping[int, Mapping[int, bytes]]
) -> dict[int, CommitEntry]:
    return {
        step: CommitEntry(committed_at, digest_of_states(states.get(step, {})), written)
        for step, committed_at, written in db.execute(
            "SELECT step, committed_at, digest FROM commits WHERE job = ? ORDER BY step", (job_id,)
        )
    }


def _read_layout(db: sqlite3.Connection, job_id: int) -> LayoutEntry:
    groups = db.execute("SELECT id, name, numel, shards FROM groups WHERE job = ? ORDER BY id", (job_id,))
    slabs = db.execute(
        "SELECT id, grp, kind, dtype, placement, codec FROM slabs WHERE grp IN (SELECT id FROM groups WHERE job = ?) "
        "ORDER BY id",
        (job_id,),
    )
    return LayoutEntry(tuple(groups), tuple(slabs))


def _damaged(path: Path, what: str) -> DataLossError:
    return DataLossError(f"{path} is damaged: it does not hold what was stored of {what}; {REMEDY}")
