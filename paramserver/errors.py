"""The errors of the daemon itself, beside those of storage/base/errors.py; rpc/status.py maps both to status codes."""

from __future__ import annotations

from storage.base.errors import NotFoundError, StorageError


class UnavailableError(StorageError):
    """The daemon cannot serve this request now; the same request can succeed later, or after a restart."""


class UnknownSessionError(NotFoundError):
    """A client wants to resume a session that this daemon does not have: it has ended, or an earlier daemon had it.

    Args:
        text: the message.
        epoch: the daemon's epoch, by which the client tells an ended session from a daemon that was restarted.
    """

    def __init__(self, text: str, epoch: str) -> None:
        super().__init__(text)
        self.epoch = epoch


class StaleCallError(StorageError):
    """The request belongs to an earlier connection of its session, and arrives late.

    The answer lacks the mark that the daemon gives to its answers, so a client treats the call as lost with that
    connection.
    """


class LateError(StorageError):
    """The client's deadline for a call is about to pass; the message says what the call still waits for."""


class StartError(StorageError):
    """The daemon cannot start on this machine as it is configured; the message says what to change."""


class ConfigError(Exception):
    """The configuration is wrong; the message names the key, the value and what is allowed."""


class TransferStalledError(StorageError):
    """A client opened a transfer, and neither takes the bytes that it asked for nor sends those that it announced."""
