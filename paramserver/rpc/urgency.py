"""The urgency of a request for bytes, which says whether it is served before another one."""

from __future__ import annotations

import enum


class Urgency(enum.IntEnum):
    """The urgency of a request; the daemon serves requests of the lowest value first."""

    DEMAND = 0
    PREFETCH = 1
