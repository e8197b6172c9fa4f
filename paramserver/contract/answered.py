"""The mark by which a client tells a daemon that answers UNAVAILABLE from a daemon that does not answer.

gRPC has one status for both. The daemon adds the mark to the trailing metadata of its own answers; the status that gRPC
makes itself when a connection fails has no mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ANSWERED = (("paramserver-answered", "1"),)


def is_answer(trailing_metadata: Iterable[Any] | None) -> bool:
    """Return whether the daemon itself has ended the call."""
    return any((key, value) == ANSWERED[0] for key, value in trailing_metadata or ())
