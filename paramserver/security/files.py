"""Atomic replacement of small files, and detection of changes to files that are edited while the daemon runs."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from paramserver.contract.durable_files import replace

# The inode, size and last change of a file. If a file is replaced or its contents change, at least one of them changes,
# so a comparison of fingerprints finds it.
Fingerprint = tuple[int, int, int]


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Write a file so that readers see the old or the new contents, never a part.

    A new file gets `mode`. A file that is there keeps its owner, its group and its mode, because the daemon that reads
    it may run as another user than the operator who changes it. If `path` is a symbolic link, the file that it names is
    replaced, because the daemon may read that file by another path. The new contents survive a loss of power, so that a
    removed token does not come back.

    Raises:
        OSError: the file cannot be written, or this user may not give it the owner and the group that it had.
    """
    path = target_of(path)
    former = _status(path)

    def write(file: IO[bytes]) -> None:
        if former is not None:
            _keep_owner(file.fileno(), former, path)
        os.fchmod(file.fileno(), mode if former is None else stat.S_IMODE(former.st_mode))
        file.write(content)

    # The file may hold a secret, so it is made with a mode that admits no other user. `write` then sets its final mode.
    replace(path, write, mode=0o600)


def target_of(path: Path) -> Path:
    """Return the path of a file that need not exist, without symbolic links.

    Raises:
        OSError: the links form a loop, or the file cannot be examined.
    """
    with suppress(FileNotFoundError):
        # `stat` is called because it raises OSError if symbolic links form a loop. `resolve` alone raises RuntimeError
        # in Python 3.11 and 3.12, and no error in 3.13.
        path.stat()
    return path.resolve()


def _keep_owner(descriptor: int, former: os.stat_result, path: Path) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) == (former.st_uid, former.st_gid):
        return
    try:
        os.fchown(descriptor, former.st_uid, former.st_gid)
    except OSError as error:
        owner = f"user {former.st_uid} and group {former.st_gid}"
        text = f"the new contents cannot belong to {owner} as the old ones do; change the file as that user or as root"
        raise OSError(error.errno, text, str(path)) from error


def fingerprint(path: Path) -> Fingerprint | None:
    """Return a value that changes when the file does, or None if the file cannot be examined."""
    status = _status(path)
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
