"""File systems that tests mount."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

BUSY_SECONDS = 30.0


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes at `path`, and unmount it at the end. Skip the test where mounting is not
    allowed."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "paramserver-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        unmount(path)


def fill(disk: Path) -> Path:
    """Write to a new file until the disk is full, and return the file's path."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 14))
    return filler


def unmount(place: Path) -> None:
    """Unmount the file system at a place whose processes have ended.

    With a load of ten on two cores, the kernel refused this twice right after it had ended a killed daemon: the file
    system was in use, and the reason is not known. So this tries again for BUSY_SECONDS, and then fails with the names
    of the processes that use it.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while (done := subprocess.run(["umount", place], capture_output=True, text=True, check=False)).returncode:
        assert time.monotonic() < deadline, f"{done.stderr.strip()}; used by {_users(place)}"
        time.sleep(0.05)


def _users(place: Path) -> list[str]:
    """Return the processes that have files below a place open, mapped or as their directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end meanwhile.
        with suppress(OSError):
            files = [process / "cwd", process / "root", *(process / "fd").iterdir(), *(process / "map_files").iterdir()]
            if any(_is_below(place, file) for file in files):
                found.append(f"{process.name}: {(process / 'cmdline').read_text()[:200]}")
    return found


def _is_below(place: Path, link: Path) -> bool:
    try:
        return link.readlink().is_relative_to(place)
    except OSError:
        return False
