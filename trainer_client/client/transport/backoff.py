"""The pauses of a client that tries again: they are doubled each time up to a limit, and each is shortened at random.

All clients of a daemon lose their connections at once. They do not come back at once, because each pauses for a random
part of its limit, at least a half.
"""

from __future__ import annotations

import random


class Backoff:
    """The lengths of the pauses between the attempts of one loop, which tries something until it succeeds."""

    def __init__(self, first_seconds: float = 0.05, longest_seconds: float = 1.0) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        # The next pause lasts at most this many seconds, and at least half of them.
        self.limit_seconds = first_seconds

    def next_seconds(self) -> float:
        """Return how long to pause now; the pause after that may be twice as long."""
        pause = self.limit_seconds * random.uniform(0.5, 1.0)
        self.limit_seconds = min(2 * self.limit_seconds, self._longest_seconds)
        return pause

    def reset(self) -> None:
        """Make the next pause as short as the first one, because the last attempt has made progress."""
        self.limit_seconds = self._first_seconds
