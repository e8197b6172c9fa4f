"""A hard limit for the memory of a process and all its children, which the kernel enforces: a control group.

This module owns the group, in version 2 or 1 of the kernel's interface, whichever is mounted; to make one takes root.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.common.measure import BenchmarkError

_ROOT = Path("/sys/fs/cgroup")
_REMOVAL_SECONDS = 10.0


class MemoryLimit:
    """A control group while its context lasts, at whose end all processes in it are killed."""

    def __init__(self, nbytes: int) -> None:
        """Describe a group whose processes have at most `nbytes` together, the page cache of their files included."""
        self.nbytes = nbytes
        self._is_old = (_ROOT / "memory").is_dir()
        self._path = _parent(is_old=self._is_old) / f"paramserver-{secrets.token_hex(4)}"

    def __enter__(self) -> Self:
        """Make the group. Raise BenchmarkError if that is not allowed, or not possible, here."""
        try:
            self._path.mkdir()
            try:
                (self._path / ("memory.limit_in_bytes" if self._is_old else "memory.max")).write_text(str(self.nbytes))
                # The kernel may count no swap; then this file is missing.
                swap, most = ("memory.memsw.limit_in_bytes", self.nbytes) if self._is_old else ("memory.swap.max", 0)
                if (self._path / swap).exists():
                    (self._path / swap).write_text(str(most))
            except BaseException:
                self._path.rmdir()
                raise
        except OSError as error:
            raise BenchmarkError(
                f"no memory limit can be set: {self._path}: {error.strerror}; run this as root where the memory "
                "controller of control groups is mounted, or without --memory-limit"
            ) from error
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A process leaves its group a moment after its end.
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while True:
            try:
                self._path.rmdir()
            except OSError:
                for pid in (self._path / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that enters the group and then becomes the command `arguments`."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', os.fspath(self._path / "cgroup.procs"), *arguments]

    @property
    def kills(self) -> int:
        """The number of processes that the kernel has killed because of the limit."""
        name = "memory.oom_control" if self._is_old else "memory.events"
        for line in (self._path / name).read_text().splitlines():
            key, value = line.split()
            if key == "oom_kill":
                return int(value)
        return 0


def _parent(*, is_old: bool) -> Path:
    """Return the group in which new groups are made: in version 1 this process's own, in version 2 the root.

    In version 2 a group that has processes cannot pass the memory controller on.
    """
    if not is_old:
        return _ROOT
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own = _ROOT / "memory" / path.lstrip("/")
            # A container without a cgroup namespace sees a path that does not exist. Its own group is the root.
            return own if own.is_dir() else _ROOT / "memory"
    return _ROOT / "memory"
