"""The steps of a job are timed from commit to commit, with the bytes and the work between, in bounded memory."""

from __future__ import annotations

import random

import pytest

from paramserver.page import steps as rooms
from paramserver.page.steps import KEPT_JOBS, KEPT_STEPS, Covered, StepLog
from storage.base.shard import LAYOUT_SEPARATOR
from storage.base.tracing import Activity, Span


def span(activity: Activity, began: float, ended: float, nbytes: int = 0, job: str = "job") -> Span:
    return Span(activity=activity, label=f"{job}/group/step 1", began_seconds=began, ended_seconds=ended, nbytes=nbytes)


class Jobs:
    """The newest steps of some jobs, and a log of their steps."""

    def __init__(self) -> None:
        self.newest: dict[str, tuple[int, float]] = {}
        self.log = StepLog(self.newest.get)

    def commit(self, number: int, ended: float, began: float | None = None, job: str = "job") -> None:
        self.newest[job] = number, ended
        self.log.note_span(span(Activity.COMMIT, ended if began is None else began, ended, job=job))


@pytest.mark.parametrize("seed", range(20))
def test_covered_time_is_that_of_the_union(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_MOST_RUNS", 8)
    chance, ticks = random.Random(seed), 2_000
    # No span is so long that it reaches back to time that was added up.
    spans = sorted(((began := chance.randrange(ticks)), began + chance.randrange(1, 20)) for _ in range(60))
    covered = Covered()
    for began, ended in sorted(spans, key=lambda pair: pair[1]):
        covered.add(began, ended)

    assert covered.seconds == len({tick for began, ended in spans for tick in range(began, ended)})


def test_a_step_has_the_time_bytes_and_work_since_the_commit_before() -> None:
    jobs = Jobs()
    jobs.commit(0, 10.0)
    jobs.log.note_span(span(Activity.NVME_READ, 10.0, 11.0, 4096))
    jobs.log.note_span(span(Activity.NVME_READ, 10.5, 11.5, 4096))
    jobs.log.note_span(span(Activity.NVME_WRITE, 11.0, 11.25, 8192))
    jobs.log.note_span(span(Activity.NVME_READ, 11.0, 12.0, 1000, job="another"))
    # The scrubber's reads are not the job's.
    jobs.log.note_span(span(Activity.SCRUB, 11.0, 12.0, 1 << 20))
    # The optimizer began before the commit, and that part is not the next step's.
    jobs.log.note_span(span(Activity.OPTIMIZER, 9.0, 12.0))
    jobs.commit(1, 13.0, began=12.5)
    (first, second) = jobs.log.of_job("job")

    assert (first.number, first.seconds) == (0, None)
    assert (second.number, second.seconds) == (1, 3.0)
    assert (second.read_bytes, second.written_bytes) == (8192, 8192)
    assert (second.all_read_bytes, second.all_written_bytes) == (9192, 8192)
    assert second.covered_seconds == {
        Activity.NVME_READ: 1.5,
        Activity.NVME_WRITE: 0.25,
        Activity.DEMAND_FETCH: 0.0,
        Activity.OPTIMIZER: 2.0,
        Activity.COMMIT: 0.5,
    }


def test_the_layouts_of_a_job_are_one_job_and_a_failed_commit_is_no_step() -> None:
    jobs = Jobs()
    jobs.commit(0, 1.0)
    jobs.log.note_span(span(Activity.COMMIT, 1.0, 2.0))
    jobs.newest["job"] = 1, 3.0
    jobs.log.note_span(span(Activity.COMMIT, 2.0, 3.0, job=f"job{LAYOUT_SEPARATOR}two ranks"))

    assert [(step.number, step.seconds) for step in jobs.log.of_job("job")] == [(0, None), (1, 2.0)]


def test_a_pause_is_no_step_time_and_a_roll_back_begins_anew() -> None:
    jobs = Jobs()
    for number in range(5):
        jobs.commit(number, float(number))
    jobs.commit(5, 3600.0)
    jobs.commit(6, 3601.0)
    assert [step.seconds for step in jobs.log.of_job("job")] == [None, 1.0, 1.0, 1.0, 1.0, None, 1.0]
    jobs.commit(2, 3602.0)
    assert [(step.number, step.seconds) for step in jobs.log.of_job("job")] == [(2, None)]


def test_a_commit_that_has_the_number_of_one_that_was_rolled_back_is_a_step() -> None:
    """An operator has rolled the job back by one step, and its next run has made that step again."""
    jobs = Jobs()
    for number in range(6):
        jobs.commit(number, float(number))
    jobs.commit(5, 20.0)
    jobs.commit(6, 21.0)
    assert [(step.number, step.seconds) for step in jobs.log.of_job("job")] == [(5, None), (6, 1.0)]


def test_bytes_that_were_fetched_and_the_time_of_the_wait_count_over_all_jobs() -> None:
    jobs = Jobs()
    jobs.log.note_span(span(Activity.DEMAND_FETCH, 1.0, 2.0, 100))
    jobs.log.note_span(span(Activity.DEMAND_FETCH, 1.5, 3.0, 100, job="another"))
    jobs.log.note_span(span(Activity.PREFETCH, 3.0, 4.0, 1000))

    assert (jobs.log.waiting_seconds, jobs.log.fetched_bytes) == (2.0, 1200)


def test_the_steps_and_the_jobs_that_are_kept_are_bounded() -> None:
    jobs = Jobs()
    for number in range(3 * KEPT_STEPS):
        jobs.commit(number, float(number), job="busy")
    for index in range(2 * KEPT_JOBS):
        jobs.commit(1, 1000.0, job=f"job {index}")
        jobs.commit(1000 + index, 2000.0 + index, job="busy")
    kept = [name for name in jobs.newest if jobs.log.of_job(name)]

    assert len(jobs.log.of_job("busy")) == KEPT_STEPS
    assert len(kept) == KEPT_JOBS and "busy" in kept, "the job that commits stays"
