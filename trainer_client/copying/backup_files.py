"""The files of a backup, in a local directory or behind a URL that fsspec knows.

A local file gets its name when it is complete and synced. A file behind a URL may have its name before it is complete,
so the backup uses only files that a manifest names. This module must never touch a file outside of its directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs

from paramserver.contract.durable_files import make_directory, replace
from trainer_client.base.foreign.files import open_regular
from trainer_client.errors import BackupError, ConfigError

_LOCK = ".lock"
# The most bytes of a file that a backup reads at once as a whole, such as a manifest, which has some hundred bytes for
# each slab.
_MOST_BYTES = 1 << 30


class BackupFiles(ABC):
    """The files of a backup, by names such as `shards/NAME`. Each method raises BackupError if the device fails.

    Attributes:
        name: the directory, as the user has written it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def _write(self, name: str, parts: Iterable[bytes | memoryview]) -> None: ...

    @abstractmethod
    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]: ...

    @abstractmethod
    def _sizes(self, directory: str) -> dict[str, int]: ...

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from writing the backup within the context, if the file system has locks.

        Raises:
            BackupError: another process is writing the backup.
        """

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file that has the parts one after another, and replace a file of the same name."""
        with self._failing("written"):
            self._write(name, parts)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open the file called `name` for reading, and close it at the end of the context."""
        with self._failing(f"read ({name})"), self._open(name) as file:
            yield file

    def read(self, name: str) -> bytes:
        """Return the bytes of a small file. Raise BackupError for a file that is larger than any manifest."""
        with self.open(name) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise BackupError(f"{self.name} cannot be read ({name}): it has more than {_MOST_BYTES} bytes")
        return content

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the sizes of the files in a directory, by name; "" is the backup's own directory.

        If there is no such directory, the result is empty.
        """
        with self._failing("read"):
            return self._sizes(directory)

    def remove(self, name: str) -> None:
        """Remove the file called `name` from the backup."""
        with self._failing("written"):
            self._remove(name)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            where = f" ({error.filename})" if error.filename else ""
            raise BackupError(f"{self.name} cannot be {what}: {reason}{where}") from None


class _LocalFiles(BackupFiles):
    def __init__(self, name: str, root: Path) -> None:
        super().__init__(name)
        self._root = root

    def _write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        path = self._root / name
        make_directory(path.parent)
        replace(path, lambda file: file.writelines(parts))

    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return open_regular(self._root / name)

    def _sizes(self, directory: str) -> dict[str, int]:
        path = self._root / directory
        if not path.exists():
            return {}
        with os.scandir(path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.name != _LOCK}

    def _remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with self._failing("written"):
            make_directory(self._root)
            descriptor = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupError(f"{self.name} is being written by another backup; wait for its end") from None
            yield
        finally:
            os.close(descriptor)


class _RemoteFiles(BackupFiles):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            self._fs, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url} is no URL that fsspec can use: {error}") from None

    def _write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            for part in parts:
                file.write(part)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        with self._fs.open(self._path(name), "rb") as file:
            yield file

    def _sizes(self, directory: str) -> dict[str, int]:
        path = self._path(directory) if directory else self._root
        # fsspec may have cached a listing of the directory from before another file was written, so the cache is
        # dropped.
        self._fs.invalidate_cache(path)
        try:
            listed: list[dict[str, Any]] = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry["size"] or 0 for entry in listed}

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        # A file system behind a URL, such as an object store, has no locks. So nothing keeps two backups apart.
        yield

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def open_files(place: str) -> BackupFiles:
    """Return the files of a backup at a local path or URL. Raise ConfigError for a URL that fsspec cannot use."""
    if "://" in place and not place.startswith("file://"):
        return _RemoteFiles(place)
    return _LocalFiles(place, Path(place.removeprefix("file://")).absolute())
