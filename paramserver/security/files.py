"""Atomic replacement of small files, and detection of changes to files that are edited while the daemon runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# A file's inode, size and time of the last change; a new file or new contents change at least one of them.
Fingerprint = tuple[int, int, int]


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Write a file so that readers see the old or the new contents, never a part. It can raise OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def fingerprint(path: Path) -> Fingerprint | None:
    """Return a value that changes when the file does, or None if the file cannot be examined."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
