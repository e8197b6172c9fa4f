"""The pace of a copy: a limit to the bytes that it sends in a second, so that training has the rest of the link.

This module owns the time at which the next bytes may be sent. It must never wait before a copy without a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Limits the bytes that a copy sends in a second. After a pause, the copy may not send faster to catch up."""

    def __init__(
        self,
        bytes_a_second: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare a pace; None means no limit. `clock` returns the time in seconds, and `sleep` waits for seconds."""
        self._bytes_a_second = bytes_a_second
        self._clock = clock
        self._sleep = sleep
        self._next_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` may be sent, which is when all earlier bytes could have been sent at the limit's rate."""
        if self._bytes_a_second is None:
            return
        now = self._clock()
        if self._next_at > now:
            self._sleep(self._next_at - now)
        self._next_at = max(now, self._next_at) + nbytes / self._bytes_a_second
