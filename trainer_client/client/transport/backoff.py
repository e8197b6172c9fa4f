"""The pauses of a client that tries again: doubled each time up to a limit, and spread.

All clients of a daemon lose their connections at once, so each takes a random part of its pause, from a half on.
"""

from __future__ import annotations

import random


class Backoff:
    """The pauses of one loop that tries again."""

    def __init__(self, first_seconds: float = 0.05, longest_seconds: float = 1.0) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        # The next pause is no longer than this.
        self.limit_seconds = first_seconds

    def next_seconds(self) -> float:
        """Return how long to pause now; the pause after that may be twice as long."""
        pause = self.limit_seconds * random.uniform(0.5, 1.0)
        self.limit_seconds = min(2 * self.limit_seconds, self._longest_seconds)
        return pause

    def reset(self) -> None:
        """Begin with the first pause again, because the last attempt has made progress."""
        self.limit_seconds = self._first_seconds
