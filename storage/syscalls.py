"""The only door to the kernel for files and shared memory.

Every operation either does all that it was asked to or raises: partial reads and writes are continued here, and
errors become the engine's, with the path and the remedy.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from storage.errors import ConflictError, DeviceError, DiskFullError
from storage.failpoints import Failpoint, reach

_PAGE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def create_shared_memory(name: str, size: int) -> int:
    """An anonymous shared-memory file with all `size` bytes allocated, so that no later touch ends in SIGBUS.

    Raises:
        DiskFullError: the machine has not that much memory to give.
    """
    # Asked first: the kernel does not refuse such an allocation, it kills processes until it fits.
    available = available_memory()
    if size > available:
        raise DiskFullError(
            f"host_budget: {size} bytes of shared memory are asked for and {available} are available; "
            "lower host_budget or free memory on this machine"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise DiskFullError(
            f"host_budget: cannot allocate {size} bytes of shared memory ({error.strerror}); "
            "lower host_budget or free memory on this machine"
        ) from error
    return fd


def available_memory() -> int:
    """Bytes that can be taken without pushing anybody out: of the machine, and of the container if it has a limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def make_directory(path: Path) -> None:
    """Makes the directory and its parents, for this user alone, where they are not there.

    Raises:
        DeviceError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DeviceError(
            f"cannot make state directory {path}: {error.strerror}; "
            "choose another --state-dir, or let this user write there"
        ) from error


def open_data_file(path: Path) -> tuple[int, bool]:
    """Opens or creates a file for page-aligned I/O; returns the descriptor and whether it bypasses the page cache.

    A file system that refuses O_DIRECT, at opening or at the first read, gets a buffered descriptor.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size < _PAGE_BYTES:
                # There must be something to read.
                os.posix_fallocate(fd, 0, _PAGE_BYTES)
            direct = _open_direct(path)
            if size < _PAGE_BYTES:
                os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise _device_error("open", path, error) from error
    if direct is None:
        return fd, False
    os.close(fd)
    return direct, True


def _open_direct(path: Path) -> int | None:
    """A descriptor that bypasses the page cache, proved by a read of one page; None where the file system refuses."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    with mmap.mmap(-1, _PAGE_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
            return None
    return fd


def allocated_bytes(fd: int) -> int:
    """Bytes of the disk that an open file occupies, by its allocated blocks, and at least its length."""
    status = os.fstat(fd)
    return max(status.st_blocks * 512, status.st_size)


def truncate(fd: int, size: int, path: Path) -> None:
    """Makes a file `size` bytes long, and gives the blocks behind back to the file system."""
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise _device_error(f"truncate to {size} bytes", path, error) from error


def file_size(fd: int) -> int:
    """Bytes of an open file."""
    return os.fstat(fd).st_size


def extend(fd: int, size: int, length: int, path: Path) -> None:
    """Makes a file of `size` bytes `length` longer, with all blocks promised by the file system."""
    try:
        os.posix_fallocate(fd, size, length)
    except OSError as error:
        # A part may have been allocated: give it back.
        os.ftruncate(fd, size)
        raise _device_error(f"reserve {length} bytes in", path, error) from error
    reach(Failpoint.FILE_GROWN)


def read_exact(fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
    """Fills `buffers`, one after the other, from the file at `offset`."""
    while buffers:
        try:
            count = os.preadv(fd, buffers, offset)
        except OSError as error:
            raise _device_error(f"read {_length(buffers)} bytes at {offset} of", path, error) from error
        if count == 0:
            raise DeviceError(f"{path} ends before byte {offset + _length(buffers)}: it was truncated; restore it")
        buffers = _rest(buffers, count)
        offset += count


def write_exact(fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
    """Writes all of `buffers`, one after the other, to the file at `offset`."""
    while buffers:
        try:
            count = os.pwritev(fd, buffers, offset)
        except OSError as error:
            raise _device_error(f"write {_length(buffers)} bytes at {offset} of", path, error) from error
        buffers = _rest(buffers, count)
        offset += count
    reach(Failpoint.DATA_WRITTEN)


def _length(buffers: Sequence[memoryview]) -> int:
    return sum(len(buffer) for buffer in buffers)


def _rest(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What a call that moved `done` bytes has left over."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def sync_data(fd: int, path: Path) -> None:
    """Returns when the device has the file's data. A failure is final: the kernel may have dropped the dirty pages."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise _device_error("sync", path, error) from error
    reach(Failpoint.DATA_SYNCED)


def sync_directory(path: Path) -> None:
    """Returns when the directory's entries are on the device."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise _device_error("sync", path, error) from error
    finally:
        os.close(fd)


def lock_file(path: Path) -> int:
    """Takes the exclusive lock `path` for this process and writes its pid there; the lock ends with the descriptor.

    Raises:
        ConflictError: another process holds it; the message names its pid.
        DeviceError: the directory cannot be written to.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _device_error("open", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConflictError(
            f"state directory {path.parent} is in use by the daemon with pid {holder}; "
            "stop that one, or give this one another --state-dir"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _device_error(verb: str, path: Path, error: OSError) -> DeviceError | DiskFullError:
    if error.errno in _FULL:
        return DiskFullError(
            f"cannot {verb} {path}: {error.strerror}; free space there or lower nvme_budget. Committed steps are intact"
        )
    return DeviceError(f"cannot {verb} {path}: {error.strerror}")
