"""The opening of files that other programs have made. A pipe in place of a file must not block this program.

A symbolic link is followed, because caches of models consist of links to the files of another directory.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: the file cannot be opened, or is a directory, a pipe, a socket or a device, which may have no end.
    """
    _check(path, path.stat())
    # The file is opened with O_NONBLOCK, because a pipe may have taken the file's place since the check, and opening a
    # pipe would wait for a writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    try:
        _check(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: see `open_regular`; or the file has more than `most_bytes`.
    """
    with open_regular(path) as file:
        # At most the reported size of the file is read, because a file of /proc has the size 0 and may have bytes
        # without end.
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, above {most_bytes}", str(path))
        return file.read(size)


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a directory, a pipe, a socket or a device, and not a file", str(path))
