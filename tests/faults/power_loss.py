"""Simulates a power loss: keeps, drops or tears the writes of a directory that no sync covered, at random.

Reads the undo log that the shim has kept since the last power loss, and changes the files accordingly. A new file may
vanish if its directory was not synced. Writes before a failed sync are always lost, even if a later sync succeeds,
because the kernel may have dropped them and marked the pages clean.
"""

from __future__ import annotations

import enum
import mmap
import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTOR_BYTES = 512


class Record(enum.IntEnum):
    """The kinds of records, with the numbers of shim.c."""

    WRITE = 1
    RESIZE = 2
    END = 3
    SYNC_BEGIN = 4
    SYNC_END = 5
    CREATE = 6
    UNLINK = 7
    KILL = 8
    FAIL = 9


class SystemCall(enum.IntEnum):
    """The kinds of calls, with the numbers of shim.c."""

    WRITE = 1
    SYNC = 2
    TRUNCATE = 3
    GROW = 4
    CREATE = 5
    UNLINK = 6


class Fate(enum.Enum):
    """The fates of a change that no sync covered."""

    KEPT = "kept"
    DROPPED = "dropped"
    TORN = "torn"


class Mood(enum.Enum):
    """The ways in which a power loss treats such changes: all alike (KEEP, DROP), or each by chance (MIX)."""

    KEEP = "keep"
    DROP = "drop"
    MIX = "mix"


_HEADER = struct.Struct("=IIQQQQQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record of the log. `data` are the bytes after its header; the other fields are those of shim.c's record."""

    record: Record
    call_kind: int
    id: int
    call: int
    inode: int
    offset: int
    length: int
    old_size: int
    data: memoryview


@dataclass(slots=True, eq=False)
class _Change:
    """A write or a change of a file's size.

    Attributes:
        ended: the call has returned, so that a later sync covers it.
        synced: a sync has covered it.
        lost: a sync that was to cover it failed.
    """

    entry: Entry
    ended: bool = False
    synced: bool = False
    lost: bool = False


@dataclass(slots=True)
class _Created:
    """A file that was created; `synced` is true once its directory was synced."""

    inode: int
    directory: int
    synced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The number of un-synced changes by their fate, and the names of the files that vanished."""

    fates: Counter[Fate]
    vanished: tuple[str, ...]


def read_log(data: memoryview) -> Iterator[Entry]:
    """Yield the complete records. The last record may be incomplete, because a kill interrupted its write."""
    at = 0
    while at + _HEADER.size <= len(data):
        kind, call_kind, id_, call, inode, offset, length, old_size, data_length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if at + data_length > len(data):
            return
        yield Entry(
            record=Record(kind),
            call_kind=call_kind,
            id=id_,
            call=call,
            inode=inode,
            offset=offset,
            length=length,
            old_size=old_size,
            data=data[at : at + data_length],
        )
        at += data_length


def trim_log(log: Path) -> None:
    """Remove an incomplete last record, so that another process can append to the log."""
    data = memoryview(log.read_bytes())
    whole = sum(_HEADER.size + len(entry.data) for entry in read_log(data))
    if whole != len(data):
        os.truncate(log, whole)


def events(log: Path) -> list[tuple[Record, SystemCall, str]]:
    """Return the kills and failures in the log: the record, the call, and the name of the file."""
    return [
        (entry.record, SystemCall(entry.call_kind), bytes(entry.data).decode())
        for entry in read_log(memoryview(log.read_bytes()))
        if entry.record in (Record.KILL, Record.FAIL)
    ]


def lose_power(directory: Path, log: Path, rng: random.Random, mood: Mood | None = None) -> Outcome:
    """Apply a power loss to the files below `directory`, and empty the log. Without a `mood`, choose one at random."""
    if log.stat().st_size == 0:
        return Outcome(fates=Counter(), vanished=())
    mood = mood or rng.choices([Mood.MIX, Mood.DROP, Mood.KEEP], [6, 3, 1])[0]
    with (
        log.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        outcome = _Replay(directory, data).apply(rng, mood)
    os.truncate(log, 0)
    return outcome


@dataclass(slots=True)
class _File:
    """A file whose changes are being undone, newest first."""

    fd: int
    size: int
    # For each sector 1 if a newer change of it was kept, so that older changes do not show any more.
    kept: bytearray
    # Whether a newer change of the file's size was kept.
    size_kept: bool = False
    # The end of the kept writes. The file cannot be shorter.
    floor: int = 0

    def undo(self, start: int, end: int, old: memoryview) -> None:
        """Restore the old bytes of `[start, end)`, padded with zeros."""
        os.pwrite(self.fd, bytes(old) + bytes(end - start - len(old)), start)

    def mark_kept(self, first: int, last: int) -> None:
        """Mark the sectors `[first, last)`: a change of them was kept."""
        if last > len(self.kept):
            self.kept.extend(bytes(last - len(self.kept)))
        self.kept[first:last] = b"\1" * (last - first)

    def has_kept(self, sector: int) -> bool:
        """Return whether a newer change of the sector was kept."""
        return sector < len(self.kept) and self.kept[sector] == 1


@dataclass(slots=True)
class _Replay:
    """A pass through the log forward, to find the durable changes, and one backward, to undo others."""

    directory: Path
    data: memoryview
    _changes: list[_Change] = field(default_factory=list)
    _created: list[_Created] = field(default_factory=list)

    def apply(self, rng: random.Random, mood: Mood) -> Outcome:
        """Choose the fate of each change, and apply it; see `lose_power`."""
        self._read()
        paths = {path.stat().st_ino: path for path in self.directory.rglob("*") if path.is_file()}
        vanished = self._vanish(paths, rng, mood)
        return Outcome(fates=self._undo(paths, rng, mood), vanished=tuple(vanished))

    def _read(self) -> None:
        under_way: dict[int, _Change] = {}
        syncs: dict[int, tuple[list[_Change], list[_Created]]] = {}
        for entry in read_log(self.data):
            if entry.record in (Record.WRITE, Record.RESIZE):
                change = under_way[entry.id] = _Change(entry)
                self._changes.append(change)
            elif entry.record is Record.END:
                under_way.pop(entry.id).ended = True
            elif entry.record is Record.SYNC_BEGIN:
                before = [c for c in self._changes if c.ended and not c.synced and c.entry.inode == entry.inode]
                syncs[entry.id] = before, [c for c in self._created if c.directory == entry.inode]
            elif entry.record is Record.SYNC_END:
                self._end_sync(*syncs.pop(entry.id), failed=entry.length != 0)
            elif entry.record is Record.CREATE:
                self._created.append(_Created(entry.inode, entry.offset))
            elif entry.record is Record.UNLINK:
                # Another file may get the same inode number later.
                self._changes = [c for c in self._changes if c.entry.inode != entry.inode]
                self._created = [c for c in self._created if c.inode != entry.inode]

    def _end_sync(self, changes: list[_Change], created: list[_Created], *, failed: bool) -> None:
        for change in changes:
            if failed:
                change.lost = not change.synced
            elif not change.lost:
                change.synced = True
        for entry in created:
            entry.synced = entry.synced or not failed

    def _vanish(self, paths: dict[int, Path], rng: random.Random, mood: Mood) -> list[str]:
        vanished = []
        for created in self._created:
            if created.synced or created.inode not in paths:
                continue
            if mood is Mood.DROP or (mood is Mood.MIX and rng.random() < 0.5):
                path = paths.pop(created.inode)
                path.unlink()
                vanished.append(path.name)
        return vanished

    def _undo(self, paths: dict[int, Path], rng: random.Random, mood: Mood) -> Counter[Fate]:
        fates: Counter[Fate] = Counter()
        files: dict[int, _File] = {}
        try:
            for change in reversed(self._changes):
                inode = change.entry.inode
                if inode not in files:
                    if inode not in paths:
                        continue
                    fd = os.open(paths[inode], os.O_RDWR | os.O_CLOEXEC)
                    files[inode] = _File(fd, os.fstat(fd).st_size, bytearray())
                fate = _choose(change, rng, mood)
                if not change.synced:
                    fates[fate] += 1
                if change.entry.record is Record.WRITE:
                    _undo_write(files[inode], change.entry, fate, rng)
                else:
                    _undo_resize(files[inode], change.entry, fate)
            for file in files.values():
                os.ftruncate(file.fd, max(file.size, file.floor))
        finally:
            for file in files.values():
                os.close(file.fd)
        return fates


def _choose(change: _Change, rng: random.Random, mood: Mood) -> Fate:
    if change.synced:
        return Fate.KEPT
    if change.lost or mood is Mood.DROP:
        return Fate.DROPPED
    if mood is Mood.KEEP:
        return Fate.KEPT
    can_tear = change.entry.record is Record.WRITE and change.entry.length > SECTOR_BYTES
    return rng.choice([Fate.KEPT, Fate.DROPPED, Fate.TORN] if can_tear else [Fate.KEPT, Fate.DROPPED])


def _undo_write(file: _File, entry: Entry, fate: Fate, rng: random.Random) -> None:
    start, end = entry.offset, entry.offset + entry.length
    first, last = start // SECTOR_BYTES, -(-end // SECTOR_BYTES)
    if fate is Fate.KEPT:
        file.mark_kept(first, last)
        kept_end = end
    else:
        kept_end = 0
        for sector in range(first, last):
            low, high = max(start, sector * SECTOR_BYTES), min(end, (sector + 1) * SECTOR_BYTES)
            if fate is Fate.TORN and rng.random() < 0.5:
                file.mark_kept(sector, sector + 1)
                kept_end = high
            elif not file.has_kept(sector):
                file.undo(low, high, entry.data[low - start : high - start])
    if file.size_kept:
        return
    file.floor = max(file.floor, kept_end)
    if end > entry.old_size:
        if fate is Fate.KEPT:
            file.size_kept = True
        else:
            file.size = entry.old_size


def _undo_resize(file: _File, entry: Entry, fate: Fate) -> None:
    if entry.offset == entry.old_size or file.size_kept:
        return
    if fate is Fate.KEPT:
        file.size_kept = True
        return
    file.size = entry.old_size
    for sector in range(entry.offset // SECTOR_BYTES, -(-entry.old_size // SECTOR_BYTES)):
        low = max(entry.offset, sector * SECTOR_BYTES)
        high = min(entry.old_size, (sector + 1) * SECTOR_BYTES)
        if not file.has_kept(sector):
            file.undo(low, high, entry.data[low - entry.offset : high - entry.offset])
