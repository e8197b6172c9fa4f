"""The number of optimizer threads of a daemon whose configuration names none. The planner uses the number, too."""

from __future__ import annotations

# The most threads that an optimizer update uses by default. More were not measured on any machine.
MOST_BY_DEFAULT = 16


def by_default(processors: int) -> int:
    """Return the number of optimizer threads of a daemon that may use `processors`; the rest is left to trainers."""
    return max(1, min(processors // 2, MOST_BY_DEFAULT))
