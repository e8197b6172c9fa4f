"""A measurement of how long a thread of this process could not run because no CPU was free, from kernel counters.

The result is 0 on a kernel that does not count (one without CONFIG_SCHED_INFO).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_THREADS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class _CpuTime:
    """One reading of the kernel's counters about the CPU time of one thread.

    Attributes:
        run_seconds: how long the thread has run.
        queued_seconds: how long it has waited for a CPU. The kernel adds a wait when the wait is over.
        ready: whether the thread runs or waits for a CPU now, so that it does not sleep.
        waiting_seconds: how long the wait under way has lasted so far.
    """

    run_seconds: float
    queued_seconds: float
    ready: bool
    waiting_seconds: float

    @property
    def waited_seconds(self) -> float:
        return self.queued_seconds + self.waiting_seconds


class CpuShortage:
    """A watch over a thread and, while that thread sleeps, over all other threads of the process.

    The other threads are watched because the sleeping thread may wait for any of them, for example for one that holds a
    lock.
    """

    def __init__(self, thread_id: int) -> None:
        self._own = _THREADS / str(thread_id)
        self._before: Mapping[Path, _CpuTime] = {}

    def restart(self) -> None:
        """Discard the last reading of the counters, so that the next call of `seconds` begins a new period."""
        self._before = {}

    def seconds(self, period_seconds: float) -> float:
        """Return for how much of the period since the last call a thread waited for a CPU; 0 at the first call.

        While the watched thread is ready, only that thread's counters are read. To read those of each other thread, the
        caller would have to wait until the watched thread releases the GIL.
        """
        before, now = self._before, self._look([self._own], period_seconds)
        if not now[self._own].ready:
            now |= self._look(_THREADS.iterdir(), period_seconds)
        self._before = now
        # If the last reading had all threads, a thread that it lacks is new, so all of the thread's waiting for a CPU
        # lies in this period. If the last reading had the watched thread only, it is unknown how long the other threads
        # waited in this period, so they are left out of the result.
        known = now.keys() if len(before) > 1 else before.keys()
        waits = [now[path].waited_seconds - before.get(path, _UNBORN).waited_seconds for path in known & now.keys()]
        return min(period_seconds, max(waits, default=0.0))

    def _look(self, threads: Iterable[Path], period_seconds: float) -> dict[Path, _CpuTime]:
        return {path: _read(path, self._before.get(path, _UNBORN), period_seconds) for path in threads}


_UNBORN = _CpuTime(0.0, 0.0, True, 0.0)
_DEAD = _CpuTime(0.0, 0.0, False, 0.0)


def _read(thread: Path, before: _CpuTime, period_seconds: float) -> _CpuTime:
    try:
        run, queued, _ = map(int, (thread / "schedstat").read_bytes().split())
        ready = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"
    except (FileNotFoundError, ProcessLookupError):
        # The kernel's file of a thread's waiting times cannot be read, because the thread has ended or this kernel does
        # not count waiting times.
        return _DEAD
    waits = ready and before.ready and run / 1e9 == before.run_seconds
    return _CpuTime(run / 1e9, queued / 1e9, ready, before.waiting_seconds + period_seconds if waits else 0.0)
