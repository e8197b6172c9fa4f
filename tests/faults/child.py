"""A process forked for one piece of work, which writes lines to its parent and ends when its parent ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Child:
    """A forked process that writes lines to a pipe. It is killed at the end of the `with` block if it still runs."""

    def __init__(self, work: Callable[[int], int], log: Path) -> None:
        """Fork. The child calls `work` with the descriptor of the pipe, and exits with the status that it returns."""
        self._pipe, theirs = os.pipe()
        self.status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                os.close(self._pipe)
                with log.open("ab", buffering=0) as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                status = work(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(theirs)
        self._said: deque[str] = deque()
        self._rest = b""
        self._ended = False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.status is None:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()
        os.close(self._pipe)

    def lines(self, seconds: float) -> Iterator[str]:
        """Yield the lines that the child writes, until it ends or the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            while self._said:
                yield self._said.popleft()
            if self._ended:
                return
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                return
            data = os.read(self._pipe, 1 << 16)
            self._ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._said += (line.decode() for line in lines)

    def end(self) -> int:
        """Kill the child if it has not ended, and return its wait status."""
        if not self._ended:
            os.kill(self._pid, signal.SIGKILL)
        self._reap()
        assert self.status is not None
        return self.status

    def _reap(self) -> None:
        self.status = os.waitpid(self._pid, 0)[1]
