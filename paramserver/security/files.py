"""Small files that people and programs edit while the daemon runs: replaced as a whole, and watched for changes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Inode, size and time of the last change: another file or other contents, as far as the file system tells.
Fingerprint = tuple[int, int, int]


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Writes a file so that readers see the old or the new contents, never a part. Raises OSError."""
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
    """Changes when the file does; None: it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
