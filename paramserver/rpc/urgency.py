"""Which of two requests for bytes is served first."""

from __future__ import annotations

import enum


class Urgency(enum.IntEnum):
    """How urgent a request is; the daemon serves the lowest value first."""

    DEMAND = 0
    PREFETCH = 1
