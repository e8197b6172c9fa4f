"""How long a thread of this process could not go on for want of a CPU, as Linux counts it.

Nothing is known, and 0 is the answer, where the kernel does not count (CONFIG_SCHED_INFO).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_THREADS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class _CpuTime:
    """Of one thread: how long it has run, and has waited for a CPU; `ready`: it does one or the other now.

    The kernel adds a wait to what it counts when the wait is over: `waiting_seconds` is of the one under way.
    """

    run_seconds: float
    queued_seconds: float
    ready: bool
    waiting_seconds: float

    @property
    def waited_seconds(self) -> float:
        return self.queued_seconds + self.waiting_seconds


class CpuShortage:
    """Looks at a thread and, while that one sleeps, at those that it may be waiting for: all others of the process."""

    def __init__(self, thread_id: int) -> None:
        self._own = _THREADS / str(thread_id)
        self._before: Mapping[Path, _CpuTime] = {}

    def forget(self) -> None:
        """What was seen last is no beginning of a period any more."""
        self._before = {}

    def seconds(self, period_seconds: float) -> float:
        """Of the period since the last look, the part in which nobody could expect the thread to go on; 0 at the first.

        A thread that runs is looked at alone: for each look at another one we would wait until it lets go of the
        interpreter.
        """
        before, now = self._before, self._look([self._own], period_seconds)
        if not now[self._own].ready:
            now |= self._look(_THREADS.iterdir(), period_seconds)
        self._before = now
        # Of a thread that was not there: all that it has waited, if the others were looked at then.
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
        # It has ended, or the kernel does not count.
        return _DEAD
    waits = ready and before.ready and run / 1e9 == before.run_seconds
    return _CpuTime(run / 1e9, queued / 1e9, ready, before.waiting_seconds + period_seconds if waits else 0.0)
