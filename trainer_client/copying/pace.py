"""The pace of a copy: a limit to the bytes that it sends in a second, so that it leaves the link to training.

This module owns the time at which the next bytes may go. It must never wait before a copy without a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """A limit to the rate of a copy. What was not sent in a pause cannot be sent faster afterwards."""

    def __init__(
        self,
        bytes_a_second: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare a pace; None means no limit. `clock` and `sleep` are those of the time that counts."""
        self._bytes_a_second = bytes_a_second
        self._clock = clock
        self._sleep = sleep
        self._next_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` may be sent: until those before them have had their time at the limit."""
        if self._bytes_a_second is None:
            return
        now = self._clock()
        if self._next_at > now:
            self._sleep(self._next_at - now)
        self._next_at = max(now, self._next_at) + nbytes / self._bytes_a_second
