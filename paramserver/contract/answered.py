"""Marks in the trailing metadata of the daemon's answers, for cases that the status code alone does not tell apart.

- gRPC has one status for a daemon that answers UNAVAILABLE and for a daemon that does not answer. The daemon marks its
  own answers; the status that gRPC makes itself when a connection fails has no mark.
- FAILED_PRECONDITION has many reasons. The daemon marks one of them, that the job holds another model, because the
  trainer adds to this error what the user can do.
- INTERNAL is also the status of a fault in the daemon. The daemon marks the answers that are about a device which has
  refused an operation, so that the client can say so.
- A client that resumes a session gets NOT_FOUND from a daemon that has ended the session, and from a daemon that was
  restarted since. The answer carries the daemon's epoch, which the client compares with that of its Welcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ANSWERED = (("paramserver-answered", "1"),)
OTHER_MODEL = (("paramserver-other-model", "1"),)
DEVICE = (("paramserver-device", "1"),)
_EPOCH_KEY = "paramserver-epoch"


def is_answer(trailing_metadata: Iterable[Any] | None) -> bool:
    """Return whether the daemon itself has ended the call."""
    return _has(trailing_metadata, ANSWERED)


def is_about_the_model(trailing_metadata: Iterable[Any] | None) -> bool:
    """Return whether the daemon has refused to open a job because the job holds another model."""
    return _has(trailing_metadata, OTHER_MODEL)


def is_about_a_device(trailing_metadata: Iterable[Any] | None) -> bool:
    """Return whether a device of the daemon has refused an operation, so that to repeat the call would not help."""
    return _has(trailing_metadata, DEVICE)


def with_epoch(epoch: str) -> tuple[tuple[str, str]]:
    """Return the trailing metadata that carry a daemon's epoch."""
    return ((_EPOCH_KEY, epoch),)


def epoch_of(trailing_metadata: Iterable[Any] | None) -> str | None:
    """Return the epoch of the daemon that has ended the call; None if the answer does not carry it."""
    return next((value for key, value in trailing_metadata or () if key == _EPOCH_KEY), None)


def _has(trailing_metadata: Iterable[Any] | None, mark: tuple[tuple[str, str]]) -> bool:
    return any((key, value) == mark[0] for key, value in trailing_metadata or ())
