"""The files that an import reads: a local path, or a copy of the files at a URL, with their checksums verified.

This module owns the copy, and removes it. If a file names another file, this module must never look for that file
outside of the checkpoint's directory.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fsspec.core import url_to_fs

from paramserver.contract.sizes import shown_size
from trainer_client.base.foreign import torch_files
from trainer_client.base.foreign.files import open_regular, read_regular
from trainer_client.errors import ConfigError, ImportCheckpointError
from trainer_client.exchange.destination import CHECKSUMS
from trainer_client.training.run.checkpoint_files import MANIFEST

# A directory with this file is a checkpoint of torch.distributed.checkpoint.
DCP_METADATA = ".metadata"
_READ_AT_ONCE = 4 << 20
_MAX_SUMS_BYTES = 256 << 20
_CHECKSUM_LINE = re.compile(r"^([0-9a-f]{64}) [ *](.+)$")
# The suffixes of files of torch.save. Such a file is a zip archive, which has a checksum of each record.
_TORCH_SUFFIXES = (".pt", ".bin", ".pth")


@contextmanager
def local_source(source: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the local path of a checkpoint, which is first copied into a temporary directory if it is at a URL.

    Raises:
        ConfigError: fsspec cannot read a URL of this kind, or the path or URL does not exist.
        ImportCheckpointError: the checkpoint cannot be copied.
    """
    text = os.fspath(source)
    if "://" not in text or text.startswith("file://"):
        path = Path(text.removeprefix("file://"))
        try:
            is_there = path.exists()
        except OSError as error:
            raise ConfigError(f"{text} cannot be read: {error.strerror}") from None
        if not is_there:
            raise ConfigError(f"{text} does not exist")
        yield path
        return
    try:
        files, root = url_to_fs(text)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{text} is no URL that fsspec can read: {error}") from None
    with tempfile.TemporaryDirectory(prefix="paramserver-import-") as directory:
        target = Path(directory) / "checkpoint"
        try:
            if not files.exists(root):
                raise ConfigError(f"{text} does not exist")
            size = files.du(root)
            free = shutil.disk_usage(directory).free
            if size > free:
                raise ImportCheckpointError(
                    f"{text} has {shown_size(size)}, and the temporary directory {directory} has {shown_size(free)} "
                    "free: make room there, or set TMPDIR"
                )
            if files.isfile(root):
                # The local copy of a checkpoint's file keeps the file's name, because the import finds the format by
                # the suffix.
                target = Path(directory) / name_within(root.rpartition("/")[2], text)
            files.get(root, str(target), recursive=True)
        except OSError as error:
            raise ImportCheckpointError(f"{text} cannot be read: {error}") from None
        yield target


def name_within(name: object, where: object) -> str:
    """Return `name`, which a file of the checkpoint gives for another file, if it has no directory in it.

    Any other name is refused with ImportCheckpointError, because it could lead outside of the checkpoint's directory.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ImportCheckpointError(f"{where} names the file {name!r}, which is not in its own directory")
    return name


def check_foreign(directory: Path) -> None:
    """Raise ImportCheckpointError if a directory has a checkpoint of this library, whose tensors are in a store."""
    if (directory / MANIFEST).is_file():
        raise ImportCheckpointError(
            f"{directory} has a checkpoint that save_checkpoint() of this library has written, whose tensors are in a "
            "store: load it with engine.load_checkpoint(), or make files of it with `paramserver export --job JOB "
            f"--kept NAME`, where JOB and NAME are `job` and `kept` in {MANIFEST}, and import these"
        )


def verify_checksums(files: Sequence[Path]) -> None:
    """Compare files with their checksums, which SHA256SUMS beside them has, or a file of torch.save itself.

    A file that has no checksum in either place is not read.

    Raises:
        ImportCheckpointError: a file differs from its checksum, or is missing.
    """
    known = {directory: _sums(directory / CHECKSUMS) for directory in {file.parent for file in files}}
    for file in files:
        if not file.is_file():
            raise ImportCheckpointError(f"{file} is missing")
        expected = known[file.parent].get(file.name)
        if expected is not None:
            if (found := _sha256(file)) != expected:
                raise ImportCheckpointError(
                    f"{file} is damaged: its SHA-256 is {found}, and {CHECKSUMS} has {expected}"
                )
        elif file.suffix in _TORCH_SUFFIXES:
            torch_files.verify(file)


def _sums(path: Path) -> dict[str, str]:
    """Return the checksum of each file that a list of the command sha256sum names; {} if `path` does not exist."""
    if not path.is_file():
        return {}
    sums: dict[str, str] = {}
    for line in read_regular(path, _MAX_SUMS_BYTES).decode(errors="replace").splitlines():
        if (match := _CHECKSUM_LINE.match(line)) is None:
            raise ImportCheckpointError(f"{path} has a line that is not of sha256sum: {line[:80]!r}")
        sums[name_within(match[2], path)] = match[1]
    return sums


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_READ_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()
