"""The directory that an export writes. The export is complete, or does not exist under its name.

A local export is written to a directory beside its destination, which gets the destination's name when it is complete.
A directory behind a URL cannot be renamed, so the file of checksums is written last: an export without it is not
complete. Until the export is complete, this module owns the files that it has written, and removes them after a
failure. It must never remove a directory that is not an export.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from fsspec.core import url_to_fs

from paramserver.contract.durable_files import make_directory, new_file, publish_directory, unfinished_name
from paramserver.contract.sizes import shown_size
from trainer_client.errors import ConfigError, ExportError

# The name of the file that has the checksum of each other file of an export, in the format of the command sha256sum. It
# is written last, so a directory without it is no complete export.
CHECKSUMS = "SHA256SUMS"
_COPIED_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of an export: its name in the directory, its size and the SHA-256 of its bytes in hexadecimal digits."""

    name: str
    size_bytes: int
    sha256: str


class _Sink(io.RawIOBase):
    """A stream that passes what a format writes on to a new file of the export, and computes the file's checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._end = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._file.write(view)
        self._end += len(view)
        return len(view)

    def tell(self) -> int:
        return self._end

    def to_written(self, name: str) -> WrittenFile:
        return WrittenFile(name=name, size_bytes=self._end, sha256=self._digest.hexdigest())


class Destination(ABC):
    """The directory of an export that is being written.

    If its context ends without an error, the directory is completed; if an error ends the context, it is removed.

    Attributes:
        name: the directory, as the user has written it.
        files: the files that were written so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.files: list[WrittenFile] = []

    @abstractmethod
    def __enter__(self) -> Self:
        """Begin to write.

        Raises:
            ExportError: the destination exists and must not be replaced, or the directory cannot be written.
        """

    @abstractmethod
    def require(self, size_bytes: int) -> None:
        """Raise ExportError if the destination's file system says that it has less than `size_bytes` free."""

    @abstractmethod
    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file for writing. When the context ends, the file system or object store has the file's bytes."""

    @abstractmethod
    def _complete(self) -> None:
        """Give the written directory the name that the user wants, if it has a temporary name until now."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove the files that this export has written, because the export has failed. An error is ignored."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._remove()
            if isinstance(error, OSError):
                raise ExportError(f"{self.name} cannot be written: {_reason(error)}; nothing is left there") from None
            return
        try:
            sums = "".join(f"{file.sha256}  {file.name}\n" for file in sorted(self.files, key=lambda file: file.name))
            with self._open(CHECKSUMS) as file:
                file.write(sums.encode())
            self._complete()
        except BaseException as failure:
            self._remove()
            if isinstance(failure, OSError):
                raise ExportError(f"{self.name} cannot be written: {_reason(failure)}") from None
            raise

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a new file, which can be written from its beginning to its end; `seek` is refused."""
        with self._open(name) as file:
            sink = _Sink(file)
            yield cast(IO[bytes], sink)
        self.files.append(sink.to_written(name))

    def copy(self, source: Path) -> None:
        """Copy a local file into the directory, under its name. Raise ConfigError if the name is taken."""
        if source.name == CHECKSUMS or any(file.name == source.name for file in self.files):
            raise ConfigError(f"{source} cannot be copied into the export, which has a file of that name")
        with source.open("rb") as file, self.create(source.name) as copied:
            while piece := file.read(_COPIED_AT_ONCE):
                copied.write(piece)


class _LocalDirectory(Destination):
    """The destination of an export to a local path: it is written under a temporary name, and renamed at the end."""

    def __init__(self, name: str, path: Path, *, overwrite: bool) -> None:
        super().__init__(name)
        self._path = path
        self._overwrite = overwrite
        self._partial = unfinished_name(path)

    def __enter__(self) -> Self:
        if os.path.lexists(self._path):
            self._check_replaceable()
        try:
            make_directory(self._path.parent)
            self._partial.mkdir()
        except OSError as error:
            raise ExportError(f"{self.name} cannot be written: {_reason(error)}") from None
        except (KeyboardInterrupt, SystemExit):
            # A signal came within `__enter__`, so Python will not call `__exit__`. So the unfinished export is removed
            # here.
            self._remove()
            raise
        return self

    def require(self, size_bytes: int) -> None:
        free = shutil.disk_usage(self._partial).free
        if size_bytes > free:
            raise ExportError(
                f"{self.name} needs {shown_size(size_bytes)}, and its file system has {shown_size(free)} free: make "
                "room, or write elsewhere"
            )

    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return new_file(self._partial / name)

    def _complete(self) -> None:
        if os.path.lexists(self._path):
            self._check_replaceable()
        publish_directory(self._partial, self._path)

    def _remove(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def _check_replaceable(self) -> None:
        """Raise ExportError if the destination exists, unless it is an export that the user allows to replace."""
        if not self._overwrite:
            raise ExportError(f"{self.name} exists: choose another name, or overwrite it (--overwrite)")
        if self._path.is_symlink() or not (self._path / CHECKSUMS).is_file():
            raise ExportError(f"{self.name} exists and is not an export, because it has no {CHECKSUMS}: remove it")


class _RemoteDirectory(Destination):
    """The destination of an export to a URL that fsspec knows: its file of checksums is written last."""

    def __init__(self, url: str, *, overwrite: bool) -> None:
        super().__init__(url)
        self._overwrite = overwrite
        self._begun: list[str] = []
        try:
            self._fs, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url} is no URL that fsspec can write to: {error}") from None

    def __enter__(self) -> Self:
        try:
            if self._fs.exists(self._root) and self._fs.ls(self._root, detail=False):
                if not self._overwrite:
                    raise ExportError(f"{self.name} exists: choose another name, or overwrite it (--overwrite)")
                if not self._fs.exists(self._path_of(CHECKSUMS)):
                    raise ExportError(
                        f"{self.name} exists and is not an export, because it has no {CHECKSUMS}: remove it"
                    )
                # The former export is removed here. Its checksum file is removed first, so that no remaining part of
                # the former export looks complete.
                self._fs.rm(self._path_of(CHECKSUMS))
                self._fs.rm(self._root, recursive=True)
            self._fs.makedirs(self._root, exist_ok=True)
        except OSError as error:
            raise ExportError(f"{self.name} cannot be written: {_reason(error)}") from None
        except (KeyboardInterrupt, SystemExit):
            # A signal came within `__enter__`, so Python will not call `__exit__`. So the unfinished export is removed
            # here.
            self._remove()
            raise
        return self

    def require(self, size_bytes: int) -> None:
        """Do nothing, because an object store does not say how much room it has."""

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        path = self._path_of(name)
        self._begun.append(path)
        with self._fs.open(path, "wb") as file:
            yield file

    def _complete(self) -> None:
        """Do nothing, because the files have their names already."""

    def _remove(self) -> None:
        for path in self._begun:
            # If a file of an unfinished export cannot be removed, the error is ignored, of whichever type the file
            # system raises it. The remaining files do not look like an export, because the checksum file is written
            # last.
            with contextlib.suppress(Exception):
                self._fs.rm(path)
        with contextlib.suppress(Exception):
            self._fs.rmdir(self._root)

    def _path_of(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def open_destination(name: str | os.PathLike[str], *, overwrite: bool) -> Destination:
    """Return the directory at a local path or URL, to be entered as a context.

    Args:
        name: a path, or a URL that fsspec knows.
        overwrite: whether an existing export is replaced.

    Raises:
        ConfigError: fsspec cannot write to a URL of this kind.
    """
    text = os.fspath(name)
    if "://" in text and not text.startswith("file://"):
        return _RemoteDirectory(text, overwrite=overwrite)
    # The path is made absolute, but symbolic links in it are not followed: the destination may be the link itself.
    path = Path(os.path.abspath(text.removeprefix("file://")))  # noqa: PTH100
    return _LocalDirectory(text, path, overwrite=overwrite)


def _reason(error: OSError) -> str:
    """Return why the file system has refused a request, for a message, with the path if the error names one."""
    reason = error.strerror or str(error)
    return f"{reason} ({error.filename})" if error.filename else reason
