"""The check of a state directory that no daemon uses: its catalog, its data files, and every committed byte.

This module owns the locks of the directories while it runs. It must only read the data files. The catalog is opened as
a daemon opens it, which verifies its digests, applies transactions that a crash left in its log, and migrates format 5.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from storage.base import syscalls
from storage.base.errors import DamagedBlockError, DeviceError, NotFoundError, StorageError
from storage.base.integrity import Checksums
from storage.base.shard import GroupSpec, Kind, SlabKey
from storage.catalog.catalog import Catalog
from storage.jobs.directories import CATALOG, LOCK
from storage.tiers.base import round_up
from storage.tiers.extents import Extent, overlapping

CHUNK_BYTES = 4 << 20


@dataclass(slots=True, kw_only=True)
class StateCheck:
    """The counts of a running check of a state directory and, when the check has ended, its result.

    `problems` has one line of text for each problem that was found.
    """

    jobs: int = 0
    kept_steps: int = 0
    versions: int = 0
    verified_bytes: int = 0
    total_bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """The place of one version of a slab, as the catalog has it: the slab of `kind` of `group`."""

    label: str
    group: GroupSpec
    kind: Kind
    extents: tuple[Extent, ...]
    checksums: bytes

    @property
    def nbytes(self) -> int:
        """The bytes of the version, in whole pages."""
        return round_up(self.group.layout(self.kind).nbytes)


def check_state(state_dir: Path, nvme_dirs: Sequence[Path] = ()) -> Iterator[StateCheck]:
    """Check a state directory, and yield one StateCheck, always the same object, after each read.

    The object shows the progress; when the iterator ends, it is the result.

    Args:
        state_dir: the state directory.
        nvme_dirs: directories of data files that are not where the catalog saw them last.

    Raises:
        NotFoundError: `state_dir` is not a state directory.
        ConflictError: a daemon uses one of the directories.
        DataLossError: the catalog is damaged.
        DeviceError: a directory cannot be used.
    """
    if not syscalls.exists(state_dir / CATALOG):
        raise NotFoundError(f"{state_dir} has no {CATALOG}: it is not a state directory")
    with ExitStack() as cleanup:
        cleanup.callback(os.close, syscalls.lock_file(state_dir / LOCK))
        catalog = Catalog(state_dir / CATALOG)
        cleanup.callback(catalog.close)
        check = StateCheck()
        versions = _versions(catalog, check)
        paths = _find_files(catalog, state_dir, nvme_dirs)
        files: dict[int, tuple[Path, int]] = {}
        for number in sorted({extent.file for version in versions for extent in version.extents}):
            path = paths.get(number)
            if path is None or not syscalls.exists(path):
                check.problems.append(f"{path or f'data.{number}'} is missing, and holds committed bytes")
                continue
            if path.parent.resolve() != state_dir.resolve():
                cleanup.callback(os.close, syscalls.lock_file(path.parent / LOCK))
            descriptor, _ = syscalls.open_data_file(path)
            cleanup.callback(os.close, descriptor)
            files[number] = path, descriptor
        check.problems += misplaced(versions, files)
        check.versions, check.total_bytes = len(versions), sum(version.nbytes for version in versions)
        yield check
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        for version in versions:
            for problem in _verify(version, files, buffer, check):
                if problem:
                    check.problems.append(problem)
                yield check


def _versions(catalog: Catalog, check: StateCheck) -> list[StoredBytes]:
    """Return the versions of all jobs and kept steps, each once, and count the jobs and the kept steps in `check`."""
    versions: dict[tuple[str, tuple[Extent, ...]], StoredBytes] = {}
    names: set[str] = set()
    for job in catalog.load():
        if job.spec.kept:
            check.kept_steps += 1
        else:
            names.add(job.spec.name)
        for group in job.groups:
            for slab in group.slabs:
                key = SlabKey(job.spec.identity, group.name, slab.kind)
                for step, stored in job.versions.get(key, {}).items():
                    label = key.label(step)
                    versions[label, stored.extents] = StoredBytes(
                        label=label, group=group, kind=slab.kind, extents=stored.extents, checksums=stored.checksums
                    )
    check.jobs = len(names)
    return list(versions.values())


def _find_files(catalog: Catalog, state_dir: Path, nvme_dirs: Sequence[Path]) -> Mapping[int, Path]:
    """Return the path of each data file by its number.

    A file in `nvme_dirs` is preferred to the path in the catalog.
    """
    paths = {0: state_dir / "data.0"}
    for number, directory in catalog.files().items():
        paths[number] = (state_dir if directory == "." else Path(directory)) / f"data.{number}"
        for other in nvme_dirs:
            if syscalls.exists(other / f"data.{number}"):
                paths[number] = other / f"data.{number}"
    return paths


def misplaced(versions: Sequence[StoredBytes], files: Mapping[int, tuple[Path, int]]) -> Iterator[str]:
    """Yield a line of text for each version that ends behind the end of its file, or overlaps another version."""
    size = {number: syscalls.file_size(descriptor) for number, (_, descriptor) in files.items()}
    placed = sorted(
        (extent.file, extent.offset, extent.end, version.label) for version in versions for extent in version.extents
    )
    for file, offset, end, label in placed:
        if file in size and end > size[file]:
            yield f"{_shown(label)}: bytes {offset} to {end} of {files[file][0]}, which has only {size[file]} bytes"
    reached = (-1, 0, "")
    for file, offset, end, label in placed:
        if file == reached[0] and offset < reached[1]:
            yield f"{_shown(label)} and {_shown(reached[2])} have the same bytes of {files[file][0]}, at {offset}"
        if file != reached[0] or end > reached[1]:
            reached = file, end, label


def _verify(
    version: StoredBytes, files: Mapping[int, tuple[Path, int]], buffer: memoryview, check: StateCheck
) -> Iterator[str]:
    """Read and verify a version in chunks, and yield once after each chunk.

    The value is the text of a problem, or "" if the chunk is intact. The bytes of the chunk are added to
    `check.verified_bytes` before the yield.
    """
    block_bytes = version.group.layout(version.kind).block_bytes
    try:
        checksums = Checksums(version.label, version.nbytes, block_bytes, version.checksums)
    except StorageError as error:
        check.verified_bytes += version.nbytes
        yield str(error)
        return
    chunk = CHUNK_BYTES // block_bytes * block_bytes
    for offset in range(0, version.nbytes, chunk):
        piece = buffer[: min(chunk, version.nbytes - offset)]
        problem = ""
        try:
            _read(version, files, offset, piece)
            checksums.verify(offset, piece)
        except DamagedBlockError as error:
            error.fqns = version.group.fqns_at(version.kind, error.offset, error.nbytes)
            problem = str(error)
        except DeviceError as error:
            problem = f"{_shown(version.label)}: {error}"
        check.verified_bytes += len(piece)
        yield problem


def _read(version: StoredBytes, files: Mapping[int, tuple[Path, int]], offset: int, piece: memoryview) -> None:
    """Fill `piece` with the bytes of a version from `offset` on. Raise DeviceError if they cannot be read."""
    done = 0
    for extent in overlapping(version.extents, offset, len(piece)):
        if extent.file not in files:
            raise DeviceError(f"data.{extent.file} is missing")
        path, descriptor = files[extent.file]
        syscalls.read_exact(descriptor, [piece[done : done + extent.nbytes]], extent.offset, path)
        done += extent.nbytes
    if done < len(piece):
        raise DeviceError(f"the catalog names {done} of {len(piece)} bytes at {offset}")


def _shown(label: str) -> str:
    # In a label, a line feed separates the name of the job from that of its layout.
    return label.replace("\n", ", layout ")
