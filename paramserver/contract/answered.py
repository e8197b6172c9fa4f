"""Tells a daemon that answers UNAVAILABLE from one that does not answer: gRPC has one status for both.

The daemon puts this mark beside its own answers; what gRPC says by itself, of a connection that failed, lacks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ANSWERED = (("paramserver-answered", "1"),)


def is_answer(trailing_metadata: Iterable[Any] | None) -> bool:
    """Return whether the daemon itself has ended the call."""
    return any((key, value) == ANSWERED[0] for key, value in trailing_metadata or ())
