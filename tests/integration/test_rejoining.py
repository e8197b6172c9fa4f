"""Ranks leave their process group and join the next one, in whatever order they do so."""

from __future__ import annotations

from tests.integration.support.ranks import run_ranks


def test_a_rank_may_join_the_next_group_before_rank_0_has_left_the_last_one() -> None:
    run_ranks("tests.integration.support.rejoining_ranks", 2, timeout_seconds=60.0)
