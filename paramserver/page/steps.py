"""The steps of the jobs as the store sees them: from commit to commit, with the bytes and the work between.

This module makes the steps from the spans of the engine. This module owns a bounded number of steps of a bounded number
of jobs. It must never wait, because a span may end on any thread, in the middle of an update.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from storage.base.shard import LAYOUT_SEPARATOR
from storage.base.tracing import Activity, Span

# The most steps of one job that the step log keeps, and the most jobs of which it keeps steps.
KEPT_STEPS = 64
KEPT_JOBS = 256
# If a step took longer than PAUSE_SECONDS, and also longer than PAUSE_FACTOR times the median of the steps before, the
# run is taken to have paused, and the step gets no duration.
PAUSE_SECONDS = 30.0
PAUSE_FACTOR = 10.0
# The activities of the engine whose time the step log keeps for each step of a job. The times of updates and syncs are
# left out, because an update consists of these activities, and a sync lies within a commit.
TIMED = (Activity.NVME_READ, Activity.NVME_WRITE, Activity.DEMAND_FETCH, Activity.OPTIMIZER, Activity.COMMIT)
# While a step is under way, the times at which an activity ran are kept as at most this many separate intervals. If
# there are more, the older ones are replaced by their total length.
_MOST_RUNS = 256


class Covered:
    """The time that spans cover together: a time that several spans cover is counted once.

    The spans come in the order of their ends. Two that end within the same instant on two threads may come in the wrong
    order, and the time between them is then counted, too.
    """

    def __init__(self) -> None:
        self._runs: deque[tuple[float, float]] = deque()
        self._added_up = 0.0

    @property
    def seconds(self) -> float:
        """The seconds that were covered by `add` so far; time that was added twice counts once."""
        return self._added_up + sum(ended - began for began, ended in self._runs)

    def add(self, began: float, ended: float) -> None:
        """Add the time from `began` to `ended` to the time that is covered."""
        while self._runs and self._runs[-1][1] >= began:
            run = self._runs.pop()
            began, ended = min(began, run[0]), max(ended, run[1])
        self._runs.append((began, ended))
        if len(self._runs) > _MOST_RUNS:
            oldest = self._runs.popleft()
            self._added_up += oldest[1] - oldest[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the store has seen of a job from the commit before a step to the step's own commit.

    Attributes:
        number: the step's number.
        committed_at: the end of its commit, on the clock of time.monotonic().
        seconds: the time since the end of the commit before. None if there is none, or after a pause.
        read_bytes, written_bytes: the bytes that NVMe moved for this job since the end of the commit before.
        all_read_bytes, all_written_bytes: the bytes that NVMe moved for all jobs in the same time.
        covered_seconds: for each activity in TIMED, the part of the same time in which the job had at least one such
            operation.
    """

    number: int
    committed_at: float
    seconds: float | None
    read_bytes: int
    written_bytes: int
    all_read_bytes: int
    all_written_bytes: int
    covered_seconds: Mapping[Activity, float]


@dataclass(slots=True)
class _Moved:
    """The bytes that were read from and written to NVMe since some moment, added up from spans."""

    read: int = 0
    written: int = 0

    def add(self, span: Span) -> None:
        if span.activity is Activity.NVME_READ:
            self.read += span.nbytes
        elif span.activity is Activity.NVME_WRITE:
            self.written += span.nbytes


@dataclass(slots=True)
class _JobSteps:
    """The last committed steps of one job, and what was seen of the next one so far."""

    kept: deque[Step] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    moved: _Moved = field(default_factory=_Moved)
    # The total of bytes that NVMe had moved for all jobs at this job's last commit. It is subtracted at the next
    # commit, so that the difference is what NVMe moved during the step.
    before: _Moved = field(default_factory=_Moved)
    covered: dict[Activity, Covered] = field(default_factory=lambda: {activity: Covered() for activity in TIMED})
    # The job's newest committed step and the time of its commit, so that a commit is noticed when they change.
    newest: tuple[int, float] | None = None

    def note(self, span: Span) -> None:
        self.moved.add(span)
        if (covered := self.covered.get(span.activity)) is not None:
            # If an operation began before the last commit, only its time after that commit counts for the step under
            # way. So no step has operations that took longer than the step.
            since = self.kept[-1].committed_at if self.kept else span.began_seconds
            covered.add(max(since, span.began_seconds), span.ended_seconds)

    def close(self, number: int, committed_at: float, total: _Moved) -> None:
        """End the step under way, because step `number` was committed. `total`: what NVMe has moved for all jobs."""
        if self.kept and number <= self.kept[-1].number:
            # The new step's number is not above the last one's, because the job was rolled back, or deleted and made
            # anew. So the kept steps do not belong before the new one.
            self.kept.clear()
        self.kept.append(
            Step(
                number=number,
                committed_at=committed_at,
                seconds=self._seconds_until(committed_at),
                read_bytes=self.moved.read,
                written_bytes=self.moved.written,
                all_read_bytes=total.read - self.before.read,
                all_written_bytes=total.written - self.before.written,
                covered_seconds={activity: covered.seconds for activity, covered in self.covered.items()},
            )
        )
        self.moved, self.before = _Moved(), _Moved(total.read, total.written)
        self.covered = {activity: Covered() for activity in TIMED}

    def _seconds_until(self, committed_at: float) -> float | None:
        if not self.kept:
            return None
        seconds = committed_at - self.kept[-1].committed_at
        before = [step.seconds for step in self.kept if step.seconds is not None]
        is_pause = seconds > PAUSE_SECONDS and before and seconds > PAUSE_FACTOR * median(before)
        return None if is_pause else seconds


class StepLog:
    """The last committed steps of each job, made from the engine's spans since the daemon started."""

    def __init__(self, newest_step: Callable[[str], tuple[int, float] | None]) -> None:
        """Make an empty log.

        Args:
            newest_step: returns the newest committed step of a job by its name: its number, and the time of its commit,
                which tells two commits of one number apart. None if there is no such step. It is called on the thread
                on which commits end.
        """
        self._newest_step = newest_step
        # The lock guards the log, because the engine's operations end on several threads: optimizer kernels run on
        # their own.
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, _JobSteps] = OrderedDict()
        self._moved = _Moved()
        self._waiting = Covered()
        self._fetched_bytes = 0

    def note_span(self, span: Span) -> None:
        """Note an operation that has ended. Any thread may call this."""
        name = span.job.partition(LAYOUT_SEPARATOR)[0]
        # A failed commit ends with a span, too, so a span does not prove that there is a new step. The job's newest
        # committed step does.
        newest = self._newest_step(name) if span.activity is Activity.COMMIT else None
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                job = self._jobs[name] = _JobSteps(before=_Moved(self._moved.read, self._moved.written))
                if len(self._jobs) > KEPT_JOBS:
                    self._jobs.popitem(last=False)
            self._moved.add(span)
            job.note(span)
            if span.activity in (Activity.DEMAND_FETCH, Activity.PREFETCH):
                self._fetched_bytes += span.nbytes
            if span.activity is Activity.DEMAND_FETCH:
                self._waiting.add(span.began_seconds, span.ended_seconds)
            if newest is not None and newest != job.newest:
                job.newest = newest
                job.close(newest[0], span.ended_seconds, self._moved)
                self._jobs.move_to_end(name)

    @property
    def waiting_seconds(self) -> float:
        """The time in which at least one client waited for bytes that had to be fetched."""
        with self._lock:
            return self._waiting.seconds

    @property
    def fetched_bytes(self) -> int:
        """The bytes that were fetched into host memory since the daemon started."""
        with self._lock:
            return self._fetched_bytes

    def of_job(self, name: str) -> Sequence[Step]:
        """Return the last steps of a job, oldest first."""
        with self._lock:
            job = self._jobs.get(name)
            return [] if job is None else list(job.kept)
