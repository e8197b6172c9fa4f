"""Whether the disks of a daemon have room for its `nvme_budget`.

If they have not, the daemon says so in its log, and a trainer that starts a daemon says so, too. A budget above the
room is no error, because a disk can grow, and other files on it can be removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from paramserver.contract.sizes import shown_size

# The unit in which Linux counts `st_blocks` of a file, whatever the block size of the file system.
_BLOCK_BYTES = 512


def room_of(files: Iterable[Path]) -> int:
    """Return the bytes that files may have together: what they occupy, and what their file systems have free.

    A file need not exist, but its directory must.

    Raises:
        OSError: a directory cannot be looked at.
    """
    occupied, free = 0, {}
    for file in files:
        system = os.statvfs(file.parent)
        free[file.parent.stat().st_dev] = system.f_bavail * system.f_frsize
        with suppress(FileNotFoundError):
            occupied += file.stat().st_blocks * _BLOCK_BYTES
    return occupied + sum(free.values())


def too_large(key: str, budget_bytes: int, files: Iterable[Path]) -> str | None:
    """Return a text for the log about a budget for which its disks have no room.

    This returns None for every other budget, and where a file system does not say how much is free.

    Args:
        key: the name of the budget's key, for the text.
        files: the data files of the budget.
    """
    paths = list(files)
    with suppress(OSError):
        if budget_bytes > (room := room_of(paths)):
            return (
                f"{key} {shown_size(budget_bytes)} is more than {', '.join(map(str, paths))} can have: what they "
                f"occupy and what is free beside them are {shown_size(room)}. Steps that need more will fail because "
                f"the disk is full: set {key} to {room >> 20}MiB or less, or make room"
            )
    return None
