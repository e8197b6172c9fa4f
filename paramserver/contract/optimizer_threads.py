"""The number of threads with which a daemon updates if its configuration names none. The planner uses it, too."""

from __future__ import annotations

# No machine was measured with more threads than these.
MOST_BY_DEFAULT = 16


def by_default(processors: int) -> int:
    """Return the number of threads for a daemon that may use so many processors, and leave the others to trainers."""
    return max(1, min(processors // 2, MOST_BY_DEFAULT))
