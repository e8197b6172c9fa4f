"""The replicas of this daemon's jobs in other daemons: how far each is behind, from what its follower reports.

A follower is a client that copies each committed step of a job into another daemon, which is called the holder. Only
this daemon knows how far the job has gone meanwhile, also while the follower or the holder is gone. So the lag is
computed here. This module owns the reports, in memory. It must never touch a job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic

from paramserver.events import EventKind, EventLog
from storage.base.errors import BudgetExceededError

# The most holders of one job's replicas.
MOST_HOLDERS = 16
# The most commits that a holder of a replica has not copied yet and whose times are remembered for it. Later commits
# are not remembered, so the holder's lag in seconds may be given too short while it catches up.
MOST_COMMITS = 4096


@dataclass(slots=True, kw_only=True)
class Replica:
    """One replica of a job.

    Attributes:
        holder: address of the daemon that holds it, for people.
        step: the newest step that the holder has, as far as followers have reported. None if none has reported a step.
        sent_bytes: the bytes that the follower has sent to the holder.
        copy_seconds: how long the copying of the last step took.
        problem: why the holder gets no steps now, or "" if it gets them.
        commits: the commits that the holder lacks, oldest first: number, and when it was made (time.monotonic).
    """

    holder: str
    step: int | None = None
    sent_bytes: int = 0
    copy_seconds: float = 0.0
    problem: str = ""
    commits: deque[tuple[int, float]] = field(default_factory=deque)

    def lag_steps(self, newest: int | None) -> int:
        """Return how many steps the holder lacks. `newest` is the newest committed step, None if there is none."""
        if newest is None:
            return 0
        return newest + 1 if self.step is None else max(0, newest - self.step)

    def lag_seconds(self, newest: int | None) -> float:
        """Return for how long the holder has lacked a committed step; 0 if it has all of them."""
        if not self.lag_steps(newest) or not self.commits:
            return 0.0
        return monotonic() - self.commits[0][1]

    def note_commit(self, step: int) -> None:
        """Take note of a commit that was made now."""
        if len(self.commits) < MOST_COMMITS:
            self.commits.append((step, monotonic()))

    def note_step(self, step: int | None, newest: int | None) -> None:
        """Take note of the newest step that the holder has."""
        self.step = step
        while self.commits and step is not None and self.commits[0][0] <= step:
            self.commits.popleft()
        if newest is not None and self.lag_steps(newest) and not self.commits:
            # The holder lacks the newest commit, whose time is not known: the commit was made before the follower's
            # first report, or was not remembered. So the replica's lag in seconds counts from now.
            self.note_commit(newest)


class Replicas:
    """The reports about the replicas of all jobs, one for each job and holder."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._of_jobs: dict[str, dict[str, Replica]] = {}

    def of_job(self, job: str) -> Iterator[Replica]:
        """Yield the report about each replica of a job."""
        yield from self._of_jobs.get(job, {}).values()

    def report(
        self,
        job: str,
        newest: int | None,
        *,
        holder: str,
        step: int | None,
        sent_bytes: int,
        copy_seconds: float,
        problem: str,
        is_finishing: bool = False,
    ) -> None:
        """Take note of what a follower reports; see Replica for the arguments.

        Args:
            is_finishing: whether the follower's trainer is gone. The report is then ignored if no replica at this
                holder is known, because another run has opened the job since, or the job was deleted.

        Raises:
            BudgetExceededError: the job has MOST_HOLDERS other replicas.
        """
        replica = self._of_jobs.get(job, {}).get(holder)
        if replica is None:
            if is_finishing:
                return
            replicas = self._of_jobs.setdefault(job, {})
            if len(replicas) >= MOST_HOLDERS:
                raise BudgetExceededError(f"job {job!r} has {MOST_HOLDERS} replicas here, and can have no more")
            replica = replicas[holder] = Replica(holder=holder)
            self._events.add(EventKind.JOB, job, f"a follower keeps a replica of the job at {holder}")
        if step is None:
            # The report has no step, because the follower was started again and does not know yet which step the holder
            # has. So the last known step stays, and so does the last known problem if the report has none.
            step, problem = replica.step, problem or replica.problem
        if bool(problem) != bool(replica.problem):
            what = f"gets no steps: {problem}" if problem else f"gets steps again, and has step {step}"
            self._events.add(EventKind.JOB, job, f"the replica at {holder} {what}")
        replica.note_step(step, newest)
        replica.sent_bytes, replica.copy_seconds, replica.problem = sent_bytes, copy_seconds, problem

    def note_commit(self, job: str, step: int) -> None:
        """Take note that a step of a job was committed now."""
        for replica in self.of_job(job):
            replica.note_commit(step)

    def forget(self, job: str) -> None:
        """Forget the replicas of a job, because another run has opened it or it was deleted. Followers report anew."""
        self._of_jobs.pop(job, None)
