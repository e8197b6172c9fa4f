"""The counts of gathers in a step report: counts by unit, their sum, and a fresh start after a reset."""

from __future__ import annotations

from trainer_client.training.step.gather_counters import GatherCounters, UnitGathers

HIT = UnitGathers(gathers=1, hits=1, predicted=1, fetched_bytes=100)
STALL = UnitGathers(gathers=1, waited_seconds=0.25, fetched_bytes=100, copied_bytes=100)


def counted() -> GatherCounters:
    counters = GatherCounters(["", "blocks.0", "blocks.1"])
    for unit, gather in ((1, HIT), (0, STALL), (1, STALL)):
        counters.note(unit, gather)
    return counters


def test_counts_are_kept_by_unit_and_summed() -> None:
    snapshot = counted().snapshot()

    assert list(snapshot.by_unit) == ["", "blocks.0"]
    assert snapshot.by_unit["blocks.0"] == UnitGathers(
        gathers=2, hits=1, predicted=1, waited_seconds=0.25, fetched_bytes=200, copied_bytes=100
    )
    assert snapshot.total == UnitGathers(
        gathers=3, hits=1, predicted=1, waited_seconds=0.5, fetched_bytes=300, copied_bytes=200
    )
    assert (snapshot.total.hits, snapshot.total.gathers, snapshot.total.predicted) == (1, 3, 1)


def test_a_snapshot_stays_as_it_is_and_a_reset_begins_at_zero() -> None:
    counters = counted()
    before = counters.snapshot()
    counters.note(1, HIT)
    assert before.by_unit["blocks.0"].gathers == 2

    counters.reset()
    assert counters.snapshot().by_unit == {}
    assert counters.snapshot().total.gathers == 0
