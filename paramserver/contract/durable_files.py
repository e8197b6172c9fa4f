"""Files and directories that appear when they are complete, and that survive a loss of power.

All files outside of the storage engine that another program may read are written by this module. The storage engine
has functions of its own (storage/base/syscalls.py), because it imports nothing of this package, and because a file that
cannot be synced is a failure of its device, with an error of its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

# A temporary file's name repeats at most this many characters of the name of the file that it will replace. The limit
# is needed because a name may have at most 255 bytes.
_REPEATED_CHARACTERS = 32


def replace(path: Path, write: Callable[[IO[bytes]], object], *, mode: int = 0o666) -> None:
    """Write a file that appears at `path` when it is complete. A failure or a crash before that changes nothing.

    Args:
        write: writes the content to the file that it gets.
        mode: the permissions of the file, from which those of the umask are taken.

    Raises:
        OSError: the file cannot be written; the error names `path`. If the directory alone cannot be synced, the error
            names the directory, and the new file is at `path`.
    """
    with prepared(path, write, mode=mode) as put:
        put()


@contextmanager
def prepared(path: Path, write: Callable[[IO[bytes]], object], *, mode: int = 0o666) -> Iterator[Callable[[], None]]:
    """Write a file beside `path`, and yield a function that renames it to `path`; `replace` describes the arguments.

    A caller that replaces several files prepares all of them first, so that a full disk is noticed before the first one
    is replaced. The new file is removed if the context ends without a call of the function.
    """
    part = unfinished_name(path)

    def put() -> None:
        with _naming(path, part):
            part.replace(path)
        sync_directory(path.parent)

    try:
        with _naming(path, part), new_file(part, mode) as file:
            write(file)
        yield put
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Create a file and yield it. If the context ends without an error, the file's bytes are on the disk.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def publish_directory(made: Path, path: Path) -> None:
    """Give a directory whose files were made by `new_file` the name `path`, in place of a directory that is there.

    Raises:
        OSError: a directory cannot be renamed or synced. If it is not the sync of the parent that failed, `path` is as
            before.
    """
    sync_directory(made)
    if not os.path.lexists(path):
        made.rename(path)
    else:
        # Linux renames a directory only to a free name, or to the name of an empty directory. So the directory that has
        # the name `path` now is renamed first.
        former = made.with_suffix(".former")
        path.rename(former)
        try:
            made.rename(path)
        except BaseException:
            former.rename(path)
            raise
        shutil.rmtree(former, ignore_errors=True)
    sync_directory(path.parent)


def unfinished_name(path: Path) -> Path:
    """Return a path that no other call returns, for what is to be renamed to `path` when it is complete.

    The name begins with a dot and has that of `path` in it, so that a user who finds it after a loss of power knows
    what it is.
    """
    return path.with_name(f".{path.name[:_REPEATED_CHARACTERS]}.{secrets.token_hex(8)}.partial")


def sync_directory(directory: Path) -> None:
    """Write a directory's entries to the disk, so that a file keeps a new name in it after a loss of power.

    Raises:
        OSError: the directory cannot be opened or synced; the error names it.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        text = "a loss of power may undo the last change in this directory, because it cannot be synced "
        raise OSError(error.errno, f"{text}({error.strerror}); run `sync`", str(directory)) from None


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents, unless it exists.

    The parent of each directory that is made is synced. Without that, a loss of power could remove the directory and
    all files in it, although these were synced. A parent that this user may not list cannot be opened, so it is not
    synced.

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


@contextmanager
def _naming(path: Path, part: Path) -> Iterator[None]:
    """Name `path` in an error of the file system that names no file, or the temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(part)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
