"""A copy keeps to its limit of bytes in a second, and gains nothing from a pause."""

from __future__ import annotations

from trainer_client.copying.pace import Pace


class Time:
    """A clock that stands still but for what is slept."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_bytes_of_a_second_take_a_second() -> None:
    time = Time()
    pace = Pace(1000, clock=lambda: time.now, sleep=time.sleep)
    for _ in range(9):
        pace.wait(500)
    assert time.now == 100.0 + 8 * 0.5


def test_a_pause_is_not_made_up_for() -> None:
    time = Time()
    pace = Pace(1000, clock=lambda: time.now, sleep=time.sleep)
    pace.wait(500)
    time.now += 60
    for _ in range(3):
        pace.wait(500)
    assert time.now == 160.0 + 2 * 0.5


def test_without_a_limit_nothing_waits() -> None:
    time = Time()
    pace = Pace(clock=lambda: time.now, sleep=time.sleep)
    for _ in range(3):
        pace.wait(1 << 40)
    assert time.now == 100.0
