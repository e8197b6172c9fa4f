"""The files by which a restart finds the store, and the check that their paths still name the files that are open.

A file that is open can be written and synced after its path was removed, or leads to another file. Each call succeeds,
but a restart does not find these bytes. So the catalog asks this module before it commits anything. This module must
never open, write or remove a file.
"""

from __future__ import annotations

from pathlib import Path

from storage.base import syscalls
from storage.base.errors import DeviceError


class OpenFiles:
    """The paths of the lock files, the catalog with its log, and the data files of one open store.

    The catalog calls `check` before each commit, because a commit to a removed file would be lost at a restart.
    """

    def __init__(self) -> None:
        self._identities: dict[Path, tuple[int, int]] = {}

    def add(self, path: Path) -> None:
        """Let `check` also check the file that `path` leads to now, which the store has opened.

        Raises:
            DeviceError: there is no file, or this user may not look there.
        """
        self._identities[path] = syscalls.identity_of(path)

    def check(self) -> None:
        """Check that each path still leads to the file that it led to when it was added.

        Raises:
            DeviceError: a path does not, so a restart would not find what is committed now.
        """
        for path, identity in self._identities.items():
            try:
                is_here = syscalls.identity_of(path) == identity
            except DeviceError as error:
                raise _misplaced(path) from error
            if not is_here:
                raise _misplaced(path)


def _misplaced(path: Path) -> DeviceError:
    return DeviceError(
        f"{path} does not lead to the file that this daemon has open any more: it was removed or replaced, or a "
        "directory of its path was moved or mounted over. A restart would not find what is committed now, so nothing "
        "is committed. Move it back; if it was removed, back up the jobs from this daemon before it stops"
    )
