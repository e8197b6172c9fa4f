"""Pauses double up to a limit, are at least half as long, and begin anew after progress."""

from __future__ import annotations

from trainer_client.client.transport.backoff import Backoff


def test_pauses_double_up_to_the_limit_and_begin_anew() -> None:
    backoff = Backoff(0.1, 0.5)
    for _ in range(2):
        for limit in (0.1, 0.2, 0.4, 0.5, 0.5):
            assert backoff.limit_seconds == limit
            assert limit / 2 <= backoff.next_seconds() <= limit
        backoff.reset()
