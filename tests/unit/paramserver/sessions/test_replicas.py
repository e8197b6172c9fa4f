"""The lag of a replica follows from the commits of the job's daemon, also while no follower reports."""

from __future__ import annotations

import pytest

from paramserver.events import EventLog
from paramserver.sessions import replicas
from paramserver.sessions.replicas import MOST_COMMITS, MOST_HOLDERS, Replicas
from storage.base.errors import BudgetExceededError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replicas, "monotonic", clock.monotonic)
    return clock


def report(
    of: Replicas,
    newest: int | None,
    step: int | None,
    problem: str = "",
    holder: str = "b:1",
    *,
    is_finishing: bool = False,
) -> None:
    of.report(
        "job",
        newest,
        holder=holder,
        step=step,
        sent_bytes=8,
        copy_seconds=0.5,
        problem=problem,
        is_finishing=is_finishing,
    )


def lag(of: Replicas, newest: int | None) -> tuple[int, float]:
    (replica,) = of.of_job("job")
    return replica.lag_steps(newest), replica.lag_seconds(newest)


def test_the_lag_begins_with_the_oldest_commit_that_the_holder_lacks(clock: Clock) -> None:
    of = Replicas(EventLog())
    of.note_commit("job", 0)
    report(of, 0, None)
    assert lag(of, 0) == (1, 0.0)
    clock.now += 2
    assert lag(of, 0) == (1, 2.0)
    report(of, 0, 0)
    assert lag(of, 0) == (0, 0.0)
    for step in (1, 2, 3):
        clock.now += 10
        of.note_commit("job", step)
    clock.now += 1
    assert lag(of, 3) == (3, 21.0)
    report(of, 3, 2)
    assert lag(of, 3) == (1, 1.0)
    report(of, 3, 3)
    assert lag(of, 3) == (0, 0.0)


def test_a_job_without_a_commit_has_no_lag(clock: Clock) -> None:
    of = Replicas(EventLog())
    report(of, None, None)
    clock.now += 5
    assert lag(of, None) == (0, 0.0)


def test_a_holder_that_never_comes_back_takes_a_bounded_memory(clock: Clock) -> None:
    of = Replicas(EventLog())
    report(of, 0, 0)
    for step in range(1, 2 * MOST_COMMITS):
        clock.now += 1
        of.note_commit("job", step)
    (replica,) = of.of_job("job")
    assert len(replica.commits) == MOST_COMMITS
    assert lag(of, 2 * MOST_COMMITS - 1) == (2 * MOST_COMMITS - 1, 2.0 * MOST_COMMITS - 2)
    report(of, 2 * MOST_COMMITS - 1, 2 * MOST_COMMITS - 2)
    assert lag(of, 2 * MOST_COMMITS - 1) == (1, 0.0), "that commit was not remembered"


def test_events_tell_when_a_replica_gets_no_steps_and_when_it_does_again() -> None:
    events = EventLog()
    of = Replicas(events)
    report(of, 1, 1)
    for _ in range(3):
        report(of, 2, 1, "no answer")
    report(of, 2, 2)
    assert [event.text for event in events.recent(10)] == [
        "a follower keeps a replica of the job at b:1",
        "the replica at b:1 gets no steps: no answer",
        "the replica at b:1 gets steps again, and has step 2",
    ]


def test_a_follower_that_was_started_again_takes_nothing_back(clock: Clock) -> None:
    """Its first report has no step and no problem, because it has not tried yet."""
    events = EventLog()
    of = Replicas(events)
    report(of, 1, 1)
    of.note_commit("job", 2)
    report(of, 2, 1, "no answer")
    clock.now += 3
    report(of, 2, None)
    (replica,) = of.of_job("job")
    assert (replica.step, replica.problem, lag(of, 2)) == (1, "no answer", (1, 3.0))
    report(of, 2, None, "another problem")
    assert (replica.step, replica.problem) == (1, "another problem")
    report(of, 2, 2)
    assert (replica.step, replica.problem, lag(of, 2)) == (2, "", (0, 0.0))
    assert [event.text for event in events.recent(10)][1:] == [
        "the replica at b:1 gets no steps: no answer",
        "the replica at b:1 gets steps again, and has step 2",
    ]


def test_a_job_has_a_limited_number_of_replicas_until_another_run_opens_it() -> None:
    of = Replicas(EventLog())
    for number in range(MOST_HOLDERS):
        report(of, 0, 0, holder=f"b:{number}")
    with pytest.raises(BudgetExceededError, match="16 replicas"):
        report(of, 0, 0, holder="another")
    of.forget("job")
    report(of, 0, 0, holder="another")
    assert [replica.holder for replica in of.of_job("job")] == ["another"]


def test_a_follower_whose_trainer_is_gone_does_not_bring_back_its_holder() -> None:
    """Another run has opened the job, with another holder, and would show that the former one lags without end."""
    of = Replicas(EventLog())
    report(of, 1, 0)
    report(of, 1, 1, is_finishing=True)
    assert [(replica.holder, replica.step) for replica in of.of_job("job")] == [("b:1", 1)]
    of.forget("job")
    report(of, 2, 2, is_finishing=True)
    assert not list(of.of_job("job"))
    report(of, 2, 2, holder="c:1")
    report(of, 3, 3, is_finishing=True)
    assert [(replica.holder, replica.step) for replica in of.of_job("job")] == [("c:1", 2)]
