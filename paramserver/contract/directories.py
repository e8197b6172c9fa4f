"""Directories whose entries survive a loss of power, for all files that are written outside of the storage engine.

The storage engine has functions of its own for this (storage/syscalls.py), because it imports nothing of this package,
and because a directory that cannot be synced is a failure of its device, with an error of its own.
"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Write a directory's entries to the disk, so that a file keeps a new name in it after a loss of power.

    Raises:
        OSError: the directory cannot be opened or synced.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents, unless it exists.

    The parent of each directory that is made is synced. Otherwise a loss of power could remove the directory with all
    files in it, although these were synced. A parent that this user may not list cannot be opened, so it is not synced.

    Args:
        mode: the permissions of the directory, from which those of the umask are taken. New parents get the default.

    Raises:
        OSError: a directory cannot be made, or a parent cannot be synced.
    """
    made = list(takewhile(lambda directory: not directory.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for directory in made:
        if os.access(directory.parent, os.R_OK):
            sync_directory(directory.parent)
