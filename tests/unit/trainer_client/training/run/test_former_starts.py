"""The starts that stay, by the numbers of steps that they have made."""

from __future__ import annotations

from trainer_client.training.run.former_starts import beyond, in_order


def named(day: int, suffix: str = "") -> str:
    return f"accelerate-202611{day:02}-101500-abcdef{suffix}"


def test_starts_that_crash_early_push_out_none_that_has_made_its_steps() -> None:
    steps = {named(1): 40_000, named(2): 100} | {named(day): day for day in range(3, 13)}
    # Two starts have made 100 steps, so the newest of the others has the third place.
    assert beyond(steps, "accelerate") == [named(day) for day in range(3, 12)]
    assert beyond({named(1): 40_000, named(2): 3}, "accelerate") == []


def test_of_the_starts_that_count_the_oldest_goes_first() -> None:
    steps = {named(4): 100, named(1): 900, named(3): 5, named(2): 400, named(3, ".2"): 200}
    assert in_order(steps, "accelerate") == [named(3), named(1), named(2), named(3, ".2"), named(4)]
    assert beyond(steps, "accelerate") == [named(3), named(1)]
