"""Backups: steps of one job as files, each with a manifest, and with bytes that manifests share.

```
DEST/backup.json              what the directory is, and of which job
DEST/steps/0000007-1200.json  the manifest of the 7th backup, of step 1200: written last, so without it there is none
DEST/shards/NAME              the compact form of one slab, or a client state
```

A manifest names each slab's file with its size and its digest. A second backup writes the slabs that have changed, and
names the files of the first backup for the unchanged slabs, once it has read and verified these files. If such a file
is damaged, the daemon still has the right bytes, so the file is written anew under the same name, and all backups that
name it are whole again. Any other file that a manifest names is never written again. This module must never write into
a directory that is not a backup, and must never return bytes that do not match their digest.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from paramserver.contract.documents import parse_json
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.store_client.connection import Connection
from trainer_client.copying.backup_files import BackupFiles, open_files
from trainer_client.copying.daemon_step import DaemonStep
from trainer_client.copying.description import PART_BYTES, CopyProgress, SlabKey, StepDescription, StoredSlab, slabs_of
from trainer_client.errors import BackupError, ConfigError

_FORMAT = "paramserver backup"
_VERSION = 1
_LABEL = "backup.json"
_STEPS = "steps"
_SHARDS = "shards"
_MANIFEST_NAME = re.compile(r"(\d{7,})-(\d+)\.json")
_FILE_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredBytes:
    """An entry of a manifest: the name and size of a file, and the XXH3-128 of its bytes in hexadecimal digits."""

    file: str
    size_bytes: int
    digest: str

    def to_json(self) -> list[Any]:
        return [self.file, self.size_bytes, self.digest]

    @classmethod
    def from_json(cls, value: Any) -> _StoredBytes:
        """Return the entry that `to_json` has made the list `value` of. Raise ValueError for any other value."""
        file, size_bytes, digest = value
        if not (_FILE_NAME.fullmatch(file) and _FILE_NAME.fullmatch(digest) and isinstance(size_bytes, int)):
            raise ValueError(f"{value} names no bytes")
        return cls(file=file, size_bytes=size_bytes, digest=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """The manifest of one backup: the step, and the files that have its bytes.

    Attributes:
        number: the number of this backup; a later one has a higher number.
        step: the description of the step that was backed up, without its client states.
        made_at_unix_seconds: the time at which the backup was made.
        slabs: the file with the bytes of each slab. Slabs that were never written or have no elements have no file.
        states: the file with the client state of each rank.
    """

    number: int
    step: StepDescription
    made_at_unix_seconds: float
    slabs: dict[SlabKey, _StoredBytes]
    states: dict[int, _StoredBytes]

    @property
    def name(self) -> str:
        return f"{_STEPS}/{self.number:07d}-{self.step.step.step}.json"

    @property
    def stored(self) -> list[_StoredBytes]:
        return [*self.slabs.values(), *self.states.values()]

    def to_text(self) -> str:
        """Return the text of the manifest's file: a line of JSON, and a line with the digest of the first line."""
        groups: dict[str, pb.DescribeStepResponse.StoredGroup] = {}
        for slab in self.step.slabs.values():
            group = groups.setdefault(slab.group.name, pb.DescribeStepResponse.StoredGroup(group=slab.group))
            group.versions.add(kind=slab.kind, version=slab.version)
        values = {
            "format": _FORMAT,
            "version": _VERSION,
            "number": self.number,
            "made_at_unix_seconds": self.made_at_unix_seconds,
            "step": _to_json(self.step.step),
            "parameters": [_to_json(parameter) for parameter in self.step.parameters],
            "groups": [_to_json(group) for group in groups.values()],
            "slabs": [[group, kind, stored.to_json()] for (group, kind), stored in self.slabs.items()],
            "client_states": [[rank, stored.to_json()] for rank, stored in self.states.items()],
        }
        line = json.dumps(values)
        return f"{line}\n{_digest_of(line.encode())}\n"

    @classmethod
    def from_text(cls, place: str, text: bytes) -> _Manifest:
        """Return the manifest that a file has as `text`.

        Raises:
            BackupError: the text is damaged, or of another version. The message names the file as `place`.
        """
        line, _, rest = text.partition(b"\n")
        if rest.strip().decode(errors="replace") != _digest_of(line):
            raise BackupError(
                f"{place} is damaged or cut off, because its digest does not match; restore another step (--step), or "
                "remove this file, and the backup before it is the newest one"
            )
        try:
            values = parse_json(line)
            if (values["format"], values["version"]) != (_FORMAT, _VERSION):
                raise BackupError(f"{place} is of version {values['version']}, and this program reads {_VERSION}")
            groups = [ParseDict(group, pb.DescribeStepResponse.StoredGroup()) for group in values["groups"]]
            step = StepDescription(
                step=ParseDict(values["step"], pb.DescribeStepResponse.StepOfJob()),
                parameters=[ParseDict(parameter, pb.Parameter()) for parameter in values["parameters"]],
                slabs=slabs_of(groups),
            )
            manifest = cls(
                number=values["number"],
                step=step,
                made_at_unix_seconds=values["made_at_unix_seconds"],
                slabs={(group, kind): _StoredBytes.from_json(stored) for group, kind, stored in values["slabs"]},
                states={rank: _StoredBytes.from_json(stored) for rank, stored in values["client_states"]},
            )
        except (ValueError, KeyError, TypeError, ParseError) as error:
            raise BackupError(f"{place} is no manifest of a backup: {error}") from None
        manifest._check(place)
        return manifest

    def _check(self, place: str) -> None:
        """Raise BackupError unless exactly the slabs that a step has written have a file, and of the right size."""
        sizes = {key: slab.size_bytes for key, slab in self.step.slabs.items() if slab.version is not None}
        if {key: size for key, size in sizes.items() if size} != {k: s.size_bytes for k, s in self.slabs.items()}:
            raise BackupError(f"{place} is no manifest of a backup: its files are not those of its slabs")
        if list(self.step.step.ranks) != sorted(self.states):
            raise BackupError(f"{place} is no manifest of a backup: its client states are not those of its ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupResult:
    """The result of a backup.

    Attributes:
        destination: the directory or URL of the backup, as the user has written it.
        job: the name of the job.
        step: the number of the step.
        total_bytes: the bytes of the whole step.
        written_bytes: the bytes of slabs that were written. The backup already had the bytes of all other slabs.
        written_slabs: the number of slabs (kinds of groups) that were written.
        repaired_slabs: how many of the written slabs had not changed, but were damaged or missing in the backup. Former
            backups that share these slabs are whole again, too.
        steps: the steps that the backup has now, oldest backup first.
        seconds: the duration of the backup.
    """

    destination: str
    job: str
    step: int
    total_bytes: int
    written_bytes: int
    written_slabs: int
    repaired_slabs: int
    steps: list[int]
    seconds: float


def back_up(
    origin: Connection,
    job: str,
    destination: str,
    *,
    step: int | None = None,
    kept: str | None = None,
    keep_last: int | None = None,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
) -> BackupResult:
    """Write a committed step of a job into a backup. If the destination has no backup yet, it is made.

    Until the new manifest is written, the backup has exactly the steps that it had before. A failure leaves only files
    that no manifest names, and the next backup removes them.

    Args:
        origin: the daemon that has the step. It holds the step until the backup is complete.
        job: the name of the job.
        destination: a directory, or a URL that fsspec knows.
        step: the step's number; without it, and without `kept`, the newest committed step.
        kept: the name of a kept step, instead of `step`.
        keep_last: the number of newest backups that are kept; None: all are kept.
        on_progress: called after each part (at most PART_BYTES) that was written.

    Raises:
        BackupError: the destination is not a backup, is another job's, or cannot be written.
        StoreError: the daemon refuses, or cannot be reached.
    """
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"{keep_last} backups cannot be kept: keep at least 1")
    files = open_files(destination)
    _check_label(files, job, must_exist=False)
    with DaemonStep(origin, job, step, kept) as source, files.locked():
        return _Writing(files, source, on_progress).run(keep_last)


class _Writing:
    def __init__(self, files: BackupFiles, source: DaemonStep, on_progress: Callable[[CopyProgress], None]) -> None:
        self._files = files
        self._source = source
        self._step = source.description
        self._on_progress = on_progress
        self._done_bytes = 0
        self._began = time.monotonic()

    def run(self, keep_last: int | None) -> BackupResult:
        former = _manifests(self._files)
        if not former:
            label = {"format": _FORMAT, "version": _VERSION, "job": self._step.step.job}
            self._files.write(_LABEL, [json.dumps(label).encode()])
        latest = _read(self._files, former[-1]) if former else None
        # The manifests of the backups that stay are read before anything is written. So if one is damaged, the error
        # comes before the backup has changed.
        kept = self._kept(former, keep_last)
        unchanged = {} if latest is None else self._unchanged(latest)
        slabs = {key: stored for key, stored in unchanged.items() if self._is_whole(stored)}
        same_bytes = sum(stored.size_bytes for stored in slabs.values())
        written = [
            slab
            for slab in self._step.slabs.values()
            if slab.version is not None and slab.size_bytes and slab.key not in slabs
        ]
        repaired = unchanged.keys() - slabs.keys()
        for slab, parts in self._source.read(written):
            name = unchanged[slab.key].file if slab.key in repaired else None
            slabs[slab.key] = self._write((part.numpy().data for part in parts), name=name)
        manifest = _Manifest(
            number=1 if latest is None else latest.number + 1,
            step=self._step,
            made_at_unix_seconds=time.time(),
            slabs=slabs,
            states={
                rank: self._write([memoryview(state)], count=False)
                for rank, state in sorted(self._step.client_states.items())
            },
        )
        self._files.write(manifest.name, [manifest.to_text().encode()])
        self._prune(kept | {manifest.name: manifest})
        return BackupResult(
            destination=self._files.name,
            job=self._step.step.job,
            step=self._step.step.step,
            total_bytes=self._step.size_bytes,
            written_bytes=self._step.size_bytes - same_bytes,
            written_slabs=len(written),
            repaired_slabs=len(repaired),
            steps=[_step_of(name) for name in _manifests(self._files)],
            seconds=time.monotonic() - self._began,
        )

    def _unchanged(self, latest: _Manifest) -> dict[SlabKey, _StoredBytes]:
        """Return, for each slab that has not changed since the newest backup, the file that has its bytes."""
        if not self._step.has_groups_of(latest.step):
            return {}
        # Only slabs with the same version can be unchanged. After a roll-back the same version number may name other
        # bytes, so the digests are compared, too.
        candidates = [
            slab
            for key, slab in self._step.slabs.items()
            if key in latest.slabs and slab.version is not None and slab.version == latest.step.slabs[key].version
        ]
        digests = self._source.digests(candidates)
        return {
            slab.key: latest.slabs[slab.key]
            for slab, digest in zip(candidates, digests, strict=True)
            if digest.hex() == latest.slabs[slab.key].digest
        }

    def _is_whole(self, stored: _StoredBytes) -> bool:
        """Read a file, and return whether its bytes match the digest in the manifest."""
        try:
            for part in _parts(self._files, stored, ""):
                self._report(part.numel())
        except BackupError:
            return False
        return True

    def _write(
        self, parts: Iterator[memoryview] | list[memoryview], *, name: str | None = None, count: bool = True
    ) -> _StoredBytes:
        """Write the bytes into the file called `name`, or else into a new file, and return the file's record."""
        name, digest, size = name or secrets.token_hex(16), xxhash.xxh3_128(), 0

        def counted() -> Iterator[memoryview]:
            nonlocal size
            for part in parts:
                digest.update(part)
                size += len(part)
                yield part
                self._report(len(part) if count else 0)

        self._files.write(f"{_SHARDS}/{name}", counted())
        return _StoredBytes(file=name, size_bytes=size, digest=digest.hexdigest())

    def _kept(self, former: Sequence[str], keep_last: int | None) -> dict[str, _Manifest]:
        """Return the former backups that stay beside the new one.

        At most `keep_last` - 1 of them stay. A former backup of the same commit does not stay, because the new one
        replaces it.
        """
        kept: dict[str, _Manifest] = {}
        for name in reversed(former):
            if keep_last is not None and len(kept) + 1 >= keep_last:
                break
            manifest = _read(self._files, name)
            if (manifest.step.origin, manifest.step.step.layout) != (self._step.origin, self._step.step.layout):
                kept[name] = manifest
        return kept

    def _prune(self, kept: Mapping[str, _Manifest]) -> None:
        """Remove all manifests except those in `kept`, and the files that none of these names."""
        for name in _manifests(self._files):
            if name not in kept:
                self._files.remove(name)
        used = {stored.file for manifest in kept.values() for stored in manifest.stored}
        for name in self._files.sizes(_SHARDS).keys() - used:
            self._files.remove(f"{_SHARDS}/{name}")

    def _report(self, more_bytes: int) -> None:
        self._done_bytes += more_bytes
        self._on_progress(CopyProgress(done_bytes=self._done_bytes, total_bytes=self._step.size_bytes))


class BackupStep:
    """A step in a backup, from which `put_step` restores it into a daemon; it implements StepSource."""

    def __init__(self, place: str, job: str, step: int | None = None) -> None:
        """Open the newest backup in `place` or, if `step` is given, the newest backup of this step.

        Raises:
            BackupError: there is no backup, the backup does not have the step, or its files are missing, cut off or
                damaged.
            ConfigError: fsspec cannot use the URL.
        """
        self._files = open_files(place)
        self.name = place
        _check_label(self._files, job, must_exist=True)
        names = _manifests(self._files)
        fitting = [name for name in names if step is None or _step_of(name) == step]
        if not fitting:
            have = ", ".join(str(_step_of(name)) for name in names) or "none"
            wanted = "a complete backup" if step is None else f"step {step}"
            raise BackupError(f"{place} does not have {wanted}; its steps are: {have}")
        self._manifest = _read(self._files, fitting[-1])
        if self._manifest.step.step.job != job:
            raise BackupError(f"{place} has a manifest of job {self._manifest.step.step.job!r}, not of {job!r}")
        self._check_files()
        described = self._manifest.step
        self.description = StepDescription(
            step=described.step,
            parameters=described.parameters,
            slabs=described.slabs,
            client_states={
                rank: b"".join(
                    bytes(part.numpy().data) for part in _parts(self._files, stored, f"rank {rank}'s client state")
                )
                for rank, stored in self._manifest.states.items()
            },
        )

    def _check_files(self) -> None:
        """Raise BackupError if a file is missing or has another size, before any file is read."""
        sizes = self._files.sizes(_SHARDS)
        for stored in self._manifest.stored:
            if (found := sizes.get(stored.file)) != stored.size_bytes:
                state = "is missing" if found is None else f"has {found} bytes in place of {stored.size_bytes}"
                raise BackupError(f"the backup {self.name} is incomplete: {_SHARDS}/{stored.file} {state}")

    def digests(self, slabs: Sequence[StoredSlab]) -> list[bytes]:
        """Return the digests in the manifest; see StepSource. `read` compares the files' bytes with these digests."""
        empty = xxhash.xxh3_128().digest()
        return [
            b""
            if slab.version is None
            else bytes.fromhex(self._manifest.slabs[slab.key].digest)
            if slab.size_bytes
            else empty
            for slab in slabs
        ]

    def read(self, slabs: Sequence[StoredSlab]) -> Iterator[tuple[StoredSlab, Iterator[torch.Tensor]]]:
        """Yield slabs with their parts; see StepSource."""
        for slab in slabs:
            what = f"{slab.group.name!r}, kind {pb.Kind.Name(slab.kind)}"
            yield slab, _parts(self._files, self._manifest.slabs[slab.key], what) if slab.size_bytes else iter(())


def _parts(files: BackupFiles, stored: _StoredBytes, what: str) -> Iterator[torch.Tensor]:
    """Yield the bytes of a backup's file in parts; `what` names the file in messages.

    Raises:
        BackupError: the file is missing or damaged. If the bytes do not match the digest, the error comes before the
            last part.
    """
    digest, size = xxhash.xxh3_128(), 0
    with files.open(f"{_SHARDS}/{stored.file}") as file:
        while part := file.read(min(PART_BYTES, stored.size_bytes - size)):
            digest.update(part)
            size += len(part)
            if size == stored.size_bytes and digest.hexdigest() != stored.digest:
                break
            yield torch.frombuffer(bytearray(part), dtype=torch.uint8)
    if size != stored.size_bytes or digest.hexdigest() != stored.digest:
        raise BackupError(
            f"the backup {files.name} is damaged: the bytes of {what} in {_SHARDS}/{stored.file} are not those that "
            "were written"
        )


def _check_label(files: BackupFiles, job: str, *, must_exist: bool) -> None:
    """Check that a directory is a backup of a job or, unless the backup must exist, that the directory is empty.

    Raises:
        BackupError: the directory is another job's backup, has other files, or must be a backup and is not.
    """
    # A directory with hidden files alone counts as empty. They are the lock, and files that a killed backup left before
    # it had written the label.
    names = [name for name in files.sizes("") if not name.startswith(".")]
    if _LABEL not in names:
        if must_exist or names:
            raise BackupError(f"{files.name} is no backup: it has no {_LABEL}")
        return
    try:
        label = parse_json(files.read(_LABEL))
        found, version, owner = label["format"], label["version"], label["job"]
    except (ValueError, KeyError, TypeError) as error:
        raise BackupError(f"{files.name} is no backup, or a damaged one: {_LABEL} cannot be read ({error})") from None
    if found != _FORMAT or version != _VERSION:
        raise BackupError(f"{files.name} is of format {found!r}, version {version}; this program reads {_VERSION}")
    if owner != job:
        raise BackupError(f"{files.name} is a backup of job {owner!r}, not of {job!r}; use another directory")


def _manifests(files: BackupFiles) -> list[str]:
    """Return the names of the manifests of all backups in the directory, oldest backup first."""
    names = [name for name in files.sizes(_STEPS) if _MANIFEST_NAME.fullmatch(name)]
    return [f"{_STEPS}/{name}" for name in sorted(names, key=_number_of)]


def _number_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2].removesuffix(".json"))


def _read(files: BackupFiles, name: str) -> _Manifest:
    return _Manifest.from_text(f"{files.name}/{name}", files.read(name))


def _to_json(message: Any) -> Any:
    return MessageToDict(message, preserving_proto_field_name=True)


def _digest_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
