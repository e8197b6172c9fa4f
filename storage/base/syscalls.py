"""System calls of the engine on files, shared memory and threads, with the engine's errors.

Every operation either completes or raises: partial reads and writes are continued here. An OSError becomes one of the
engine's errors, whose message names the path and the remedy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import shlex
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from storage.base.errors import ConflictError, DeviceError, DiskFullError
from storage.base.failpoints import Failpoint, reach
from storage.base.shown_sizes import shown_size

_PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")
# The fields of C's `struct flock`: type, whence, start, length, pid; `0q` pads its end to the alignment of a long.
_FLOCK = "hhqqi0q"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25
# The bytes that one call of madvise collapses into huge pages. Each call first makes all processors drain their lists
# of pages, so small pieces are slow (measured for 1 GiB: 2.8 s in pieces of 2 MiB, 0.3 s in pieces of 16 or 64 MiB).
_COLLAPSE_BYTES = 32 << 20
_PR_SET_NAME = 15
_MAX_THREAD_NAME_BYTES = 15


def create_shared_memory(name: str, size: int) -> int:
    """Create an anonymous shared-memory file and return its descriptor.

    All `size` bytes are allocated at once, and the size is sealed (F_SEAL_SHRINK in man 2 fcntl), so no later access to
    a page can end in SIGBUS, even if a process that has the descriptor calls ftruncate.

    Raises:
        DiskFullError: the machine does not have that much memory available.
        DeviceError: the kernel refuses to create the file, or does not report how much memory is available.
    """
    _check_available(size, "host_budget")
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise DeviceError(
            f"host_budget: cannot create shared memory (memfd_create: {error.strerror}); "
            "allow this process to use it: a sandbox may forbid it"
        ) from error
    _allocate(fd, size, "the machine", "host_budget")
    try:
        _seal_size(fd)
    except OSError as error:
        os.close(fd)
        raise DeviceError(f"host_budget: cannot seal the size of shared memory: {error.strerror}") from error
    return fd


def create_named_shared_memory(path: Path, size: int, mark: bytes, *, mark_at: int, key: str, budget: str) -> int:
    """Create shared memory with a name: a file of mode 0600 on a tmpfs. Return its descriptor.

    The file has `mark` at byte `mark_at`, by which a later call recognizes it. This process holds a POSIX lock on the
    file's first byte as long as the process lives. A file with the mark that no process locks was left behind by a
    process that died, and is replaced.

    Args:
        path, size, mark, mark_at: the file's name, its size in bytes, and the mark with its place.
        key, budget: the keys of the configuration that give the path and the size, for the texts of errors.

    Raises:
        DiskFullError: the machine or the tmpfs does not have that much memory available.
        DeviceError: `path` is not on a tmpfs, cannot be created, or exists without the mark.
        ConflictError: `path` exists, and a living process has locked it.
    """
    if (kind := _file_system_of(path.parent, key)) != "tmpfs":
        raise DeviceError(
            f"{key}: {path} would be on {kind}, whose pages are written to a disk; choose a path on a tmpfs, such as "
            "/dev/shm"
        )
    _check_available(size, budget)
    try:
        # The file has no name until it is complete, so no process can see a partial file, and a failure leaves no file
        # behind.
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DeviceError(f"{key}: cannot create {path}: {error.strerror}; choose another path") from error
    _allocate(fd, size, f"the file system of {key} {path}", budget)
    try:
        os.pwrite(fd, mark, mark_at)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        try:
            _give_name(fd, path)
        except FileExistsError:
            _remove_abandoned(path, mark, mark_at, key)
            _give_name(fd, path)
    except OSError as error:
        os.close(fd)
        raise DeviceError(f"{key}: cannot name {path}: {error.strerror}; choose another path") from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _give_name(fd: int, path: Path) -> None:
    """Link an O_TMPFILE descriptor to a path, in the way that open(2) describes."""
    # `os.link` follows the symbolic link in /proc only if it gets directory descriptors. Otherwise it would link the
    # symbolic link itself.
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _remove_abandoned(path: Path, mark: bytes, mark_at: int, key: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.pread(fd, len(mark), mark_at) != mark:
            raise DeviceError(f"{key}: {path} exists and no daemon has made it; choose another path, or remove it")
        if is_locked_elsewhere(fd, 0):
            raise ConflictError(f"{key}: {path} is in use by another daemon; choose another path")
        path.unlink()
    finally:
        os.close(fd)


def unlink_shared_memory(path: Path, fd: int) -> None:
    """Unlink `path` if it still names the open file `fd`."""
    with suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(fd)):
            path.unlink()


def is_locked_elsewhere(fd: int, offset: int) -> bool:
    """Return whether another process holds a POSIX record lock on the byte at `offset`."""
    return _find_lock(fd, offset)[0] != fcntl.F_UNLCK


def locker(fd: int, offset: int) -> int | None:
    """Return the id of the process that holds a POSIX record lock on the byte at `offset`.

    The result is None if no other process holds a lock, or if the kernel does not show that process here, because it is
    in another PID namespace.
    """
    kind, pid = _find_lock(fd, offset)
    return None if kind == fcntl.F_UNLCK or pid <= 0 else pid


def _find_lock(fd: int, offset: int) -> tuple[int, int]:
    """Return the kind of the lock of another process on the byte at `offset`, and the id of that process."""
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, wanted))
    return kind, pid


def _check_available(size: int, budget: str) -> None:
    # The free memory is compared before the allocation, because the kernel would not refuse an allocation that is too
    # large. It would kill processes until there is room.
    available = available_memory()
    if size > available:
        raise DiskFullError(
            f"{budget}: {shown_size(size)} of shared memory are asked for and {shown_size(available)} are available; "
            f"lower {budget} or free memory on this machine"
        )


def _allocate(fd: int, size: int, where: str, budget: str) -> None:
    """Allocate all bytes of the file now; close it if that fails.

    Raises:
        DiskFullError: there is not enough memory.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise DiskFullError(
            f"{budget}: cannot allocate {shown_size(size)} of shared memory ({error.strerror}); "
            f"lower {budget} or free memory on {where}"
        ) from error


def _seal_size(fd: int) -> None:
    """Make the size of a memfd final. No process that gets the descriptor can change it, or take the seals off."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _file_system_of(directory: Path, key: str) -> str:
    """Return the type of the file system that holds a directory, such as "tmpfs"."""
    try:
        number = directory.stat().st_dev
        mounts = _MOUNTS.read_text().splitlines()
    except OSError as error:
        raise DeviceError(f"{key}: cannot use {directory}: {error.strerror}; choose another path") from error
    wanted = f"{os.major(number)}:{os.minor(number)}"
    types = (line.split(" - ", 1)[1].split()[0] for line in mounts if line.split()[2] == wanted)
    return next(types, "an unknown file system")


def create_huge_shared_memory(name: str, size: int) -> int:
    """Create anonymous shared memory in huge pages that the administrator has reserved. Return its descriptor.

    The size is sealed as that of `create_shared_memory` is.
    `size` must be a multiple of HUGE_PAGE_BYTES.

    Raises:
        DeviceError: not enough huge pages are reserved.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        os.posix_fallocate(fd, 0, size)
        _seal_size(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        pages = max(1, size // HUGE_PAGE_BYTES)
        raise DeviceError(
            f"huge_pages: cannot allocate {shown_size(size)} in pages of 2 MiB ({error.strerror}); reserve {pages} of "
            f"them (sysctl vm.nr_hugepages={pages}), or set huge_pages to false"
        ) from error
    return fd


def map_shared_memory(fd: int, size: int) -> memoryview:
    """Map all `size` bytes of shared memory, and return a view of them.

    The memory stays mapped as long as a view of it exists. It begins at an address that is a multiple of
    HUGE_PAGE_BYTES, because only then the processor uses one address translation for a whole huge page. In ordinary
    pages of 4 KiB, an update of states that are not in the processor's caches takes twice as long, because it also
    misses the translations of their pages (measured for AdamW, 151 million parameters: 0.50 s of a CPU, and 0.24 s in
    huge pages).

    Raises:
        DeviceError: the process has no free address range of this size.
    """
    try:
        reserved = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise DeviceError(f"cannot map {size} bytes of shared memory: {error.strerror}") from error
    begin = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    lead = -begin % HUGE_PAGE_BYTES
    _map(begin + lead, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    return memoryview(reserved)[lead : lead + size]


def collapse_pages(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Move shared memory into huge pages, in place and piece by piece. The contents stay and may be in use meanwhile.

    Direct I/O of a buffer in huge pages has a few segments instead of one per page, so a device takes a large request
    at once instead of in several. `map_shared_memory` says why huge pages also make the processor faster.

    Yields:
        For each piece, in order, the offset of its end and the number of its bytes that are in huge pages now. That
        number is 0 if the kernel is too old (6.1 is the first that can do this), or if pages of the piece are under I/O
        at this moment.
    """
    reserved = _map(None, _COLLAPSE_BYTES + HUGE_PAGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    # The kernel collapses pages only where they are mapped at a multiple of a huge page. The pages stay huge when this
    # temporary mapping is removed.
    window = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    try:
        for offset in range(0, whole, _COLLAPSE_BYTES):
            length = min(_COLLAPSE_BYTES, whole - offset)
            _map(window, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
            if _libc.madvise(ctypes.c_void_p(window), ctypes.c_size_t(length), _MADV_COLLAPSE) == 0:
                yield offset + length, length
            else:
                yield offset + length, 0
    finally:
        _libc.munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(_COLLAPSE_BYTES + HUGE_PAGE_BYTES))


def _map(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), protection, flags, fd, ctypes.c_long(offset))
    if mapped == _MAP_FAILED:
        raise DeviceError(f"cannot map {size} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
    return int(mapped)


def lock_memory(memory: memoryview) -> None:
    """Lock the pages of a mapping in memory, so that they are not swapped out while it exists.

    Raises:
        DeviceError: this process has no permission to lock that many bytes.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(memory))) == 0:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "any number" if limit == resource.RLIM_INFINITY else shown_size(limit)
    raise DeviceError(
        f"lock_memory: cannot lock {shown_size(len(memory))} ({os.strerror(ctypes.get_errno())}), {allowed} are "
        "allowed; raise the limit (ulimit -l, or LimitMEMLOCK= of the systemd unit), or set lock_memory to false"
    )


def available_memory() -> int:
    """Return the bytes of memory that a process can allocate without swapping, on the machine and in its container.

    Raises:
        DeviceError: /proc/meminfo cannot be read.
    """
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError) as error:
        raise DeviceError(
            f"host_budget: cannot tell how much memory is available: MemAvailable cannot be read from {_MEMINFO} "
            f"({error}); mount /proc"
        ) from error
    return min([available, *_left_in_cgroups()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryGroups:
    """The files in which one version of cgroups shows the memory of a group. They are in the group's directory.

    Attributes:
        root: the directory of the version's hierarchy, relative to /sys/fs/cgroup; "" is that directory itself.
        controller: the name in the second field of /proc/self/cgroup, where version 2 has none.
        limit, used: the files with the limit and with the bytes in use.
        cache: the entries of `memory.stat` that have the bytes of cached files, with those of the groups inside this
            one.
    """

    root: str
    controller: str
    limit: str
    used: str
    cache: tuple[str, str]


# Where version 2 and version 1 of cgroups tell the limits of memory. A host has one of the versions or both (systemd
# calls this hybrid). If it has both, version 1 has the limits of memory.
_MEMORY_GROUPS = (
    _MemoryGroups(
        root="",
        controller="",
        limit="memory.max",
        used="memory.current",
        cache=("active_file", "inactive_file"),
    ),
    _MemoryGroups(
        root="memory",
        controller="memory",
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        cache=("total_active_file", "total_inactive_file"),
    ),
)


def _left_in_cgroups() -> Iterator[int]:
    """Yield, for each memory limit of the cgroups that contain this process, the bytes that it still allows."""
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return
    for groups in _MEMORY_GROUPS:
        for _, controllers, path in lines:
            if groups.controller in controllers.split(","):
                yield from _left_in_group(groups, path)


def _left_in_group(groups: _MemoryGroups, path: str) -> Iterator[int]:
    """Yield, for each memory limit of the cgroup at `path` and of its parents, the bytes that it still allows."""
    root = _CGROUPS / groups.root
    group = root / path.removeprefix("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            return
        try:
            limit = (directory / groups.limit).read_text().strip()
            used = int((directory / groups.used).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except OSError:
            # A group whose files cannot be read is skipped: the root group of version 2 has no limit, and a container
            # does not see the groups that contain its own.
            continue
        # Version 1 of cgroups shows a number near 2^63 as the limit of a group that has none. Such a limit less the
        # used bytes is more than any machine has, so the caller, which takes the minimum, ignores it.
        if limit != "max":
            # The kernel counts cached pages of files as used, and drops them when memory is needed, so they are added
            # to the free bytes.
            yield max(0, int(limit) - used + sum(int(stat[name]) for name in groups.cache))


def make_directory(path: Path, option: str) -> None:
    """Create a directory in a parent that exists, with access for this user only, unless it exists.

    Parents are not created, because a path with several new directories is one whose disk is not mounted, or a mistyped
    one. The parent is synced, because otherwise a loss of power could remove the directory with all that was synced
    into it. A parent that this user may not list cannot be opened, so it is not synced.

    Raises:
        DeviceError: it cannot be created or synced. The message names the daemon's option that gives the path.
    """
    try:
        is_there = path.exists()
        path.mkdir(exist_ok=True, mode=0o700)
    except FileNotFoundError as error:
        raise DeviceError(
            f"cannot make directory {path}, because {path.parent} does not exist, as where a disk is not mounted: "
            f"mount it, or run `mkdir -p {shlex.quote(str(path.parent))}`, or choose another {option}"
        ) from error
    except OSError as error:
        raise DeviceError(
            f"cannot make directory {path}: {error.strerror}; choose another {option}, or let this user write there"
        ) from error
    if not is_there and os.access(path.parent, os.R_OK):
        sync_directory(path.parent)


def open_data_file(path: Path) -> tuple[int, bool]:
    """Open or create a file for page-aligned I/O. Return its descriptor, and whether it bypasses the page cache.

    If the file system refuses O_DIRECT, at opening or at the first read, the descriptor is buffered.

    Raises:
        DiskFullError: the file system has no room for the first page.
        DeviceError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size < _PAGE_BYTES:
                # `_open_direct` reads the first page of the file, so an empty file gets one page before it is opened.
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
    """Open a file with O_DIRECT and read one page of it. Return its descriptor; None if the file system refuses."""
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
    """Return the bytes of disk that an open file occupies: its allocated blocks, or its length if that is more."""
    status = os.fstat(fd)
    return max(status.st_blocks * 512, status.st_size)


def truncate(fd: int, size: int, path: Path) -> None:
    """Make a file `size` bytes long, and free its blocks behind that.

    Raises:
        DeviceError: the file system refuses.
    """
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise _device_error(f"truncate to {size} bytes", path, error) from error


def file_size(fd: int) -> int:
    """Return the length of an open file in bytes."""
    return os.fstat(fd).st_size


def extend(fd: int, size: int, length: int, path: Path) -> None:
    """Extend a file of `size` bytes by `length` bytes, and allocate all their blocks now.

    Raises:
        DiskFullError: the file system does not have that much room. The file is as long as before.
        DeviceError: the file system refuses for another reason. The file is as long as before, unless the file system
            refuses to truncate it, too, as one that has become read-only does.
    """
    try:
        os.posix_fallocate(fd, size, length)
    except OSError as error:
        # The file system may have allocated some blocks of the file before it refused the rest. The truncation frees
        # them.
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise _device_error(f"reserve {length} bytes in", path, error) from error
    reach(Failpoint.FILE_GROWN)


def read_exact(fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
    """Fill `buffers`, one after the other, with the file's bytes from `offset` on.

    Raises:
        DeviceError: the file cannot be read, or ends too early.
    """
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
    """Write all of `buffers`, one after the other, to the file from `offset` on.

    Raises:
        DiskFullError, DeviceError: the file system refuses. Some of the bytes may have been written.
    """
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
    """Return the part of the buffers that a partial read or write has left, after its first `done` bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def sync_data(fd: int, path: Path) -> None:
    """Sync the file's data to the device.

    Raises:
        DeviceError: the sync failed. A second call proves nothing, because the kernel may have dropped the dirty pages.
    """
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise _device_error("sync", path, error) from error
    reach(Failpoint.DATA_SYNCED)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a small file atomically, and sync the new file and its directory.

    After a failure or a crash, the path has either the former file or the whole new one.

    Raises:
        DiskFullError, DeviceError: the file cannot be written, or it or its directory cannot be synced.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            sync_data(file.fileno(), path)
        unfinished.replace(path)
    except OSError as error:
        raise DeviceError(f"cannot write {path}: {error.strerror}; let this user write there") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the directory's entries to the device.

    Raises:
        DeviceError: the directory cannot be opened, or the sync failed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _device_error("sync", path, error) from error


def lock_file(path: Path) -> int:
    """Lock the file `path` exclusively and write this process's pid into it. Return its descriptor.

    The lock is released when the descriptor is closed.

    Raises:
        ConflictError: another process holds the lock; the message names the directory and the pid.
        DiskFullError: the file system has no room for the pid.
        DeviceError: the file cannot be opened, created or locked.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _device_error("open", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The pid of the process that holds the lock is padded to a fixed length, so one write replaces the former pid,
        # and a reader of the lock file never finds half of one.
        os.pwrite(fd, f"{os.getpid():<10}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConflictError(
            f"directory {path.parent} is in use by the daemon with pid {holder}; "
            "stop that one, or give this one another --state-dir and other --nvme-dir"
        ) from error
    except OSError as error:
        os.close(fd)
        raise _device_error("lock", path, error) from error
    return fd


def exists(path: Path) -> bool:
    """Return whether there is a file or a directory at `path`.

    Raises:
        DeviceError: this user may not look there.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _device_error("look at", path, error) from error
    return True


def identity_of(path: Path) -> tuple[int, int]:
    """Return the numbers of a file's device and inode, which no other file has for as long as this one is open.

    The inode number survives a rename, and a copy of the file has another one.

    Raises:
        DeviceError: the file's status cannot be read.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise _device_error("look at", path, error) from error
    return status.st_dev, status.st_ino


def _device_error(verb: str, path: Path, error: OSError) -> DeviceError | DiskFullError:
    if error.errno in _FULL:
        return DiskFullError(
            f"cannot {verb} {path}: {error.strerror}; free space there or lower nvme_budget. Committed steps are intact"
        )
    return DeviceError(f"cannot {verb} {path}: {error.strerror}")


def name_thread(name: str) -> None:
    """Set the name of the calling thread that `top -H` and /proc show. The kernel keeps its first 15 bytes."""
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:_MAX_THREAD_NAME_BYTES]), 0, 0, 0)


def renice_thread(nice: int) -> None:
    """Raise the calling thread's niceness to `nice` (0 to 19, where 19 yields the most), unless it is higher already.

    Raises:
        DeviceError: the kernel refuses.
    """
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) < nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        raise DeviceError(f"worker_nice: cannot make a thread's niceness {nice}: {error.strerror}") from error
