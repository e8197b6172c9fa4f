"""Reads and writes are completed, even if the kernel does them in pieces, or raise an error that names the file."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from storage.base import syscalls
from storage.base.errors import DeviceError, DiskFullError


def in_pieces(monkeypatch: pytest.MonkeyPatch, name: str, rng: random.Random) -> list[int]:
    """Make a vectored system call move only a part of its bytes; return the list that gets the sizes of the parts."""
    real, counts = getattr(os, name), []

    def some(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        whole = b"".join(buffers)
        length = rng.randint(1, len(whole))
        part = memoryview(bytearray(whole[:length]))
        count: int = real(fd, [part], offset)
        if name == "preadv":
            copied = 0
            for buffer in buffers:
                n = min(len(buffer), count - copied)
                buffer[:n] = part[copied : copied + n]
                copied += n
        counts.append(count)
        return count

    monkeypatch.setattr(os, name, some)
    return counts


def test_short_reads_and_writes_are_continued_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, path = random.Random(1), tmp_path / "data"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    sizes = [1, 100, 7, 300, 0, 92]
    data = [memoryview(bytearray(rng.randbytes(size))) for size in sizes]
    written = in_pieces(monkeypatch, "pwritev", rng)
    syscalls.write_exact(fd, data, 200, path)
    back = [memoryview(bytearray(size)) for size in sizes]
    read = in_pieces(monkeypatch, "preadv", rng)
    syscalls.read_exact(fd, back, 200, path)
    os.close(fd)
    assert back == data and path.read_bytes() == bytes(200) + b"".join(data) + bytes(300)
    assert sum(written) == sum(read) == sum(sizes) and min(len(written), len(read)) > 1


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, DiskFullError, "No space left on device; free space there or lower nvme_budget"),
        (errno.EDQUOT, DiskFullError, "Committed steps are intact"),
        (errno.EROFS, DeviceError, "Read-only file system"),
        (errno.EIO, DeviceError, "Input/output error"),
    ],
)
def test_what_the_kernel_refuses_is_said_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], says: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "data"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    page = memoryview(bytearray(4096))
    for name in ("preadv", "pwritev", "fdatasync", "posix_fallocate", "ftruncate"):
        monkeypatch.setattr(os, name, refuse)
    calls: list[Callable[[], None]] = [
        lambda: syscalls.read_exact(fd, [page], 0, path),
        lambda: syscalls.write_exact(fd, [page], 0, path),
        lambda: syscalls.sync_data(fd, path),
        lambda: syscalls.extend(fd, 0, 4096, path),
    ]
    for call in calls:
        with pytest.raises(kind, match=says) as caught:
            call()
        assert str(path) in str(caught.value)
    os.close(fd)


@pytest.mark.parametrize(
    ("module", "function", "number", "kind", "says"),
    [
        (os, "pwrite", errno.ENOSPC, DiskFullError, "cannot lock .*/lock: No space left on device; free space there"),
        (os, "pwrite", errno.EDQUOT, DiskFullError, "cannot lock .*/lock: Disk quota exceeded"),
        (fcntl, "flock", errno.ENOLCK, DeviceError, "cannot lock .*/lock: No locks available"),
    ],
)
def test_a_directory_that_cannot_be_locked_is_named_and_can_be_locked_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    function: str,
    number: int,
    kind: type[Exception],
    says: str,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(module, function, refuse)
        with pytest.raises(kind, match=says):
            syscalls.lock_file(tmp_path / "lock")
    os.close(syscalls.lock_file(tmp_path / "lock"))


def test_the_parent_of_a_new_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(syscalls, "sync_directory", synced.append)
    for _ in range(2):
        syscalls.make_directory(tmp_path / "state", "--state-dir")
        assert synced == [tmp_path], "an existing directory has no new entry"
    monkeypatch.chdir(tmp_path)
    syscalls.make_directory(Path("other"), "--state-dir")
    assert synced[1:] == [Path()]


def test_a_directory_is_not_made_where_its_disk_is_not_mounted(tmp_path: Path) -> None:
    state = tmp_path / "disk of a" / "state"
    with pytest.raises(
        DeviceError,
        match=rf"cannot make directory {state}, because {state.parent} does not exist.*`mkdir -p '{state.parent}'`, "
        "or choose another --state-dir",
    ):
        syscalls.make_directory(state, "--state-dir")
    assert not state.parent.exists()


def test_a_directory_that_cannot_be_synced_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=f"cannot sync {tmp_path}/gone: No such file or directory"):
        syscalls.sync_directory(tmp_path / "gone")
