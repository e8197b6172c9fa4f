"""Opens the NVMe tier over its directories, and knows which data file belongs in which.

File 0 is in the state directory. Every other directory carries a label, a small JSON file that says which file of which
store it is for: paths change with mounts, labels do not. The catalog knows a file before its label is written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from storage import syscalls
from storage.catalog.catalog import Catalog
from storage.errors import ConflictError, DeviceError
from storage.tiers.data_file import DataFile
from storage.tiers.extents import Extent, without
from storage.tiers.nvme import NvmeTier

LABEL = "paramserver.json"


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
    stuck_after_seconds: float,
) -> NvmeTier:
    """The tier over `directories`, or the state directory where there are none; `used` is what the catalog names.

    Raises:
        ConflictError: a directory belongs to another store, or one with committed bytes is missing.
        DeviceError: a directory cannot be used.
        DataLossError: a file does not fit the catalog.
        BudgetExceededError: committed versions alone exceed the budget.
    """
    places = await _find_files(catalog, state_dir, directories or [state_dir], used)
    bad = [found.extent for found in catalog.bad_extents() if found.extent.file in places]
    async with AsyncExitStack() as undo:
        files: list[DataFile] = []
        for number, directory in places.items():
            named = [extent for extent in used if extent.file == number]
            set_aside = [part for extent in bad if extent.file == number for part in without(extent, named)]
            file = DataFile(
                number,
                directory / f"data.{number}",
                [*named, *set_aside],
                read_threads=read_threads,
                write_threads=write_threads,
                nice=nice,
            )
            undo.push_async_callback(file.io.close)
            files.append(file)
            syscalls.sync_directory(directory)
        if len(files) > 1:
            for file in files:
                room = budget_bytes - sum(other.occupied_bytes for other in files)
                await file.probe(room // len(files))
        tier = NvmeTier(files, budget_bytes, bad, stuck_after_seconds=stuck_after_seconds)
        undo.pop_all()
    return tier


async def _find_files(
    catalog: Catalog, state_dir: Path, directories: Iterable[Path], used: Iterable[Extent]
) -> dict[int, Path]:
    """The directory of each file, by the file's number."""
    known, holding = catalog.files(), {extent.file for extent in used}
    places: dict[int, Path] = {}
    for directory in directories:
        syscalls.make_directory(directory)
        number = 0
        if not _is_same(directory, state_dir):
            number = await _number_of(catalog, directory.absolute(), known, holding)
        if number in places:
            raise ConflictError(f"nvme_dirs names {directory} twice; each directory counts once")
        places[number] = directory
    for number in sorted(holding - places.keys()):
        raise ConflictError(
            f"data.{number} holds committed bytes and its directory, last {known.get(number, state_dir)}, is not among "
            "nvme_dirs; add it again (a directory whose disk was moved is known by its label, whatever its path)"
        )
    return places


async def _number_of(catalog: Catalog, directory: Path, known: Mapping[int, str], holding: Iterable[int]) -> int:
    """Which file belongs in a directory, by its label; a new one is labelled."""
    label = await _read_label(directory)
    if label is not None:
        if label.get("store") != catalog.store_id or label.get("file") not in known:
            raise ConflictError(
                f"{directory} belongs to another store (see {directory / LABEL}); choose another directory, or delete "
                "that store's files there"
            )
        return int(label["file"])
    # A crash may have come between the catalog's entry and the label: the entry is taken up again.
    number = next((n for n, where in known.items() if where == str(directory) and n not in set(holding)), None)
    if number is None:
        if str(directory) in known.values():
            raise ConflictError(
                f"{directory} held committed bytes and has no label {LABEL} any more; mount the right disk there"
            )
        number = catalog.add_file(str(directory))
    await _write_label(directory, {"store": catalog.store_id, "file": number})
    return number


async def _read_label(directory: Path) -> dict[str, Any] | None:
    try:
        async with aiofiles.open(directory / LABEL) as file:
            label = json.loads(await file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DeviceError(
            f"cannot read {directory / LABEL}: {error}; restore it, or choose another directory"
        ) from error
    return label if isinstance(label, dict) else {}


async def _write_label(directory: Path, label: Mapping[str, Any]) -> None:
    """Whole or not at all, and on the device when this returns."""
    path, unfinished = directory / LABEL, directory / f"{LABEL}.unfinished"
    try:
        async with aiofiles.open(unfinished, "w") as file:
            await file.write(json.dumps(label) + "\n")
            await file.flush()
            await asyncio.to_thread(syscalls.sync_data, file.fileno(), unfinished)
        await aiofiles.os.replace(unfinished, path)
    except OSError as error:
        raise DeviceError(f"cannot write {path}: {error.strerror}; let this user write there") from error
    await asyncio.to_thread(syscalls.sync_directory, directory)


def _is_same(directory: Path, other: Path) -> bool:
    return directory.resolve() == other.resolve()
