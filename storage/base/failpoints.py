"""Named instants at which a crash is most likely to reveal a mistake. The fault campaigns kill the process there.

In production no handler is installed, so `reach` costs one comparison.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class Failpoint(enum.Enum):
    """The instants at which a test may kill the process, in the order in which a version of a slab reaches them."""

    DATA_WRITTEN = "data written"
    FILE_GROWN = "file grown"
    DATA_SYNCED = "data synced"
    BEFORE_FLIP = "before flip"
    AFTER_FLIP = "after flip"
    DURING_RECLAIM = "during reclaim"
    DURING_RECOVERY = "during recovery"


_handler: Callable[[Failpoint], None] | None = None


def install(handler: Callable[[Failpoint], None] | None) -> None:
    """Set the function that each failpoint calls, on the thread that reaches it; None removes it."""
    global _handler  # noqa: PLW0603 - a failpoint kills the whole process, so one handler per process is right
    _handler = handler


def reach(failpoint: Failpoint) -> None:
    """Call the installed handler, if any. The code calls this at the instant that `failpoint` names."""
    if _handler is not None:
        _handler(failpoint)
