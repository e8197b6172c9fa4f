"""Named instants at which a crash is most likely to show a mistake. Fault campaigns kill the process there.

Without a handler, which is how the engine always runs, reaching one costs a comparison.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class Failpoint(enum.Enum):
    """Instants in the life of a version, in their order."""

    DATA_WRITTEN = "data written"
    FILE_GROWN = "file grown"
    DATA_SYNCED = "data synced"
    BEFORE_FLIP = "before flip"
    AFTER_FLIP = "after flip"
    DURING_RECLAIM = "during reclaim"
    DURING_RECOVERY = "during recovery"


_handler: Callable[[Failpoint], None] | None = None


def install(handler: Callable[[Failpoint], None] | None) -> None:
    """Sets what happens at each failpoint, on whatever thread reaches it; None: nothing."""
    global _handler  # noqa: PLW0603 - one process has one life to lose
    _handler = handler


def reach(failpoint: Failpoint) -> None:
    """Marks the instant."""
    if _handler is not None:
        _handler(failpoint)
