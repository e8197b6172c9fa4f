"""The window is wide enough to hide a fetch behind the computation, and no wider than the stalls require."""

from __future__ import annotations

from trainer_client.training.step.window import Window

MIB = 1 << 20


def measured(*, compute_seconds: float, fetch_seconds_per_mib: float) -> Window:
    window = Window()
    for _ in range(4):
        window.note_compute(compute_seconds)
    window.note_fetches(10 * MIB, 10 * fetch_seconds_per_mib)
    return window


def test_before_anything_is_measured_the_next_units_are_asked_for() -> None:
    assert Window().resize(MIB) == 2


def test_fast_fetches_need_no_more() -> None:
    assert measured(compute_seconds=0.1, fetch_seconds_per_mib=0.01).resize(MIB) == 2


def test_slow_fetches_are_asked_for_as_many_units_ahead_as_they_take() -> None:
    window = measured(compute_seconds=0.1, fetch_seconds_per_mib=0.09)

    assert [window.resize(size * MIB) for size in (1, 3, 5)] == [2, 4, 6]


def test_there_is_a_limit() -> None:
    assert measured(compute_seconds=1e-6, fetch_seconds_per_mib=1.0).resize(MIB) == 64


def test_the_pace_follows_what_was_fetched_since() -> None:
    window = measured(compute_seconds=0.1, fetch_seconds_per_mib=0.09)
    before = window.resize(4 * MIB)
    for total in range(20, 420, 10):
        window.note_fetches(total * MIB, total * 0.001)  # The second call brings no new bytes, so it measures nothing.
        window.note_fetches(total * MIB, total * 0.001)

    assert window.resize(4 * MIB) < before


def test_stalls_widen_the_window_and_calm_narrows_it() -> None:
    window = measured(compute_seconds=0.1, fetch_seconds_per_mib=0.01)
    for _ in range(3):
        window.note_gather(stalled=True)
    assert window.resize(MIB) == 5

    for _ in range(64):
        window.note_gather(stalled=False)
    assert window.resize(MIB) == 4
    for _ in range(1000):
        window.note_gather(stalled=False)
    assert window.resize(MIB) == 2
