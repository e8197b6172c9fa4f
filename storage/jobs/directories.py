"""This module opens the NVMe tier over its directories, and finds the data file that belongs in each.

File 0 is in the state directory. Every other directory has a label, a small JSON file with the identity of its store
and the number of its data file, because paths change with mounts. The catalog records a file before its label is
written.

A copy of the state directory (a backup, a clone) has a catalog that names the original's data files in the other
directories. Two stores must never write into one data file, so each directory is locked while it is in use, and its
label has the inode number of the one catalog file that it belongs to. A copy of the catalog has another inode number.
`adopt` gives the directories to a copy.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiofiles

from storage.base import syscalls
from storage.base.errors import ConflictError, DeviceError, NotFoundError
from storage.base.tracing import Tracer
from storage.catalog.catalog import Catalog
from storage.tiers.data_file import DataFile
from storage.tiers.extents import Extent, without
from storage.tiers.nvme import NvmeRegion, NvmeTier, OnDamage

LABEL = "paramserver.json"
LOCK = "lock"
CATALOG = "catalog.sqlite"
# The key under which a data directory's label has the inode number of the catalog's file.
INODE = "catalog_inode"


async def open_nvme(
    catalog: Catalog,
    state_dir: Path,
    directories: Sequence[Path],
    used: Sequence[Extent],
    *,
    budget_bytes: int,
    read_threads: int,
    write_threads: int,
    nice: int,
    tracer: Tracer,
    on_damage: OnDamage,
    on_freed: Sequence[Callable[[NvmeRegion], None]],
) -> NvmeTier:
    """Open the NVMe tier with one data file in each of `directories`, or in the state directory if there are none.

    Args:
        catalog: the open catalog, which knows the number and the last directory of each data file.
        state_dir: the state directory, which the caller has locked.
        directories: the directories of the data files.
        used: the extents of all versions in the catalog. All other bytes of the files are free.
        budget_bytes: the most bytes that all data files together may occupy.
        read_threads: the number of reading threads of each file.
        write_threads: the number of writing threads of each file.
        nice: the niceness of these threads.
        tracer, on_damage: see NvmeTier.
        on_freed: see NvmeTier.

    Raises:
        ConflictError: a directory is in use, belongs to another store or to the original of this copied store, or a
            directory with committed bytes is missing.
        DeviceError: a directory cannot be used.
        DataLossError: a data file does not match the catalog.
        BudgetExceededError: the committed versions alone exceed the budget.
    """
    async with AsyncExitStack() as undo:
        places = await _find_files(catalog, state_dir, directories or [state_dir], used, undo)
        bad = [found.extent for found in catalog.bad_extents() if found.extent.file in places]
        files: list[DataFile] = []
        for number, (directory, lock) in places.items():
            named = [extent for extent in used if extent.file == number]
            set_aside = [part for extent in bad if extent.file == number for part in without(extent, named)]
            file = DataFile(
                number,
                directory / f"data.{number}",
                [*named, *set_aside],
                read_threads=read_threads,
                write_threads=write_threads,
                nice=nice,
                lock_fd=None if lock is None else lock.fd,
            )
            if lock is not None:
                lock.keep()
            undo.push_async_callback(file.close)
            files.append(file)
            syscalls.sync_directory(directory)
        if len(files) > 1:
            for file in files:
                room = budget_bytes - sum(other.occupied_bytes for other in files)
                await file.probe(room // len(files))
        tier = NvmeTier(files, budget_bytes, bad, tracer=tracer, on_damage=on_damage, on_freed=on_freed)
        undo.pop_all()
    return tier


async def adopt(state_dir: Path, directories: Sequence[Path]) -> None:
    """Give the data directories of a store to a copy of its state directory. The original must not be used again.

    Raises:
        NotFoundError: the state directory has no catalog.
        ConflictError: a daemon uses one of the directories, or a directory has no label of this store.
        DeviceError: a directory cannot be used.
        DataLossError: the catalog is damaged.
    """
    if not syscalls.exists(state_dir / CATALOG):
        raise NotFoundError(f"{state_dir} has no {CATALOG}: it is not a state directory")
    directories = [directory for directory in directories if not _is_same(directory, state_dir)]
    with ExitStack() as locks:
        for directory in [state_dir, *directories]:
            _Lock(directory, locks)
        catalog = Catalog(state_dir / CATALOG)
        locks.callback(catalog.close)
        labels = {directory: await _read_label(directory) for directory in directories}
        for directory, label in labels.items():
            _check_store(catalog, directory, label or {}, catalog.files())
        for directory, label in labels.items():
            await _write_label(directory, {**(label or {}), **_owner(catalog)})


class _Lock:
    """The lock of a directory. The exit stack `locks` releases it at its end, unless `keep` was called.

    Attributes:
        fd: the descriptor that holds the lock.
    """

    def __init__(self, directory: Path, locks: ExitStack | AsyncExitStack) -> None:
        """Lock the directory.

        Raises:
            ConflictError: another process has locked it.
        """
        self.fd = syscalls.lock_file(directory / LOCK)
        self._kept = False
        locks.callback(self._release)

    def keep(self) -> None:
        """Keep the lock when the exit stack ends. The caller closes the descriptor later, and so releases the lock."""
        self._kept = True

    def _release(self) -> None:
        if not self._kept:
            os.close(self.fd)


async def _find_files(
    catalog: Catalog,
    state_dir: Path,
    directories: Iterable[Path],
    used: Iterable[Extent],
    locks: AsyncExitStack,
) -> dict[int, tuple[Path, _Lock | None]]:
    """Lock the data directories, and return the directory of each data file and its lock, by the file's number.

    The state directory has None in place of a lock, because the engine has locked it already.
    """
    known, holding = catalog.files(), {extent.file for extent in used}
    places: dict[int, tuple[Path, _Lock | None]] = {}
    seen: set[Path] = set()
    for directory in directories:
        syscalls.make_directory(directory, "--nvme-dir")
        if directory.resolve() in seen:
            raise ConflictError(f"nvme_dirs names {directory} twice; each directory counts once")
        seen.add(directory.resolve())
        if _is_same(directory, state_dir):
            places[0] = directory, None
            continue
        lock = _Lock(directory, locks)
        number = await _number_of(catalog, directory.absolute(), known, holding)
        if number in places:
            raise ConflictError(
                f"{directory} and {places[number][0]} are both labelled as the directory of data.{number} (see "
                f"{directory / LABEL}); one is a copy: leave it out of nvme_dirs"
            )
        places[number] = directory, lock
    for number in sorted(holding - places.keys()):
        raise ConflictError(
            f"data.{number} holds committed bytes and its directory, last {known.get(number, state_dir)}, is not among "
            "nvme_dirs; add it again (a directory whose disk was moved is known by its label, whatever its path)"
        )
    return places


async def _number_of(catalog: Catalog, directory: Path, known: Mapping[int, str], holding: Iterable[int]) -> int:
    """Return the number of the file that belongs in a directory, by its label. A new directory gets a label."""
    label = await _read_label(directory)
    if label is not None:
        _check_store(catalog, directory, label, known)
        if label.get(INODE) != _owner(catalog)[INODE]:
            raise ConflictError(
                f"{directory} belongs to the original of this state directory, and {catalog.path} is a copy (or was "
                "moved to another file system): both would write into the same data file. To use the copy from now on, "
                f"and never the original again, run `paramserver adopt` with --state-dir {catalog.path.parent} and the "
                "--nvme-dir of each data directory; to use both, give this one other --nvme-dir"
            )
        return int(label["file"])
    # The catalog may have a number for the data file although its directory has no label: an earlier start of the
    # daemon recorded the file in the catalog and crashed before it wrote the label. In this case the file keeps the
    # recorded number.
    number = next((n for n, where in known.items() if where == str(directory) and n not in set(holding)), None)
    if number is None:
        if str(directory) in known.values():
            raise ConflictError(
                f"{directory} held committed bytes and has no label {LABEL} any more; mount the right disk there"
            )
        number = catalog.add_file(str(directory))
    await _write_label(directory, {"store": catalog.store_id, "file": number, **_owner(catalog)})
    return number


def _check_store(catalog: Catalog, directory: Path, label: Mapping[str, Any], known: Mapping[int, str]) -> None:
    if label.get("store") != catalog.store_id or label.get("file") not in known:
        raise ConflictError(
            f"{directory} belongs to another store (see {directory / LABEL}); choose another directory, or delete "
            "that store's files there"
        )


def _owner(catalog: Catalog) -> dict[str, int]:
    """Return the field of a label that identifies the catalog of the store: the inode number of the catalog's file."""
    return {INODE: syscalls.identity_of(catalog.path)[1]}


async def _read_label(directory: Path) -> dict[str, Any] | None:
    try:
        async with aiofiles.open(directory / LABEL) as file:
            label = json.loads(await file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DeviceError(
            f"cannot read {directory / LABEL}: {error}; restore it, or choose another directory"
        ) from error
    return label if isinstance(label, dict) else {}


async def _write_label(directory: Path, label: Mapping[str, Any]) -> None:
    """Write a label atomically and sync it to the device."""
    await asyncio.to_thread(syscalls.replace_file, directory / LABEL, f"{json.dumps(label)}\n".encode())


def _is_same(directory: Path, other: Path) -> bool:
    return directory.resolve() == other.resolve()
