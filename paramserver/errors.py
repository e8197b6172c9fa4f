"""What can go wrong in the daemon itself, beside what storage/errors.py names; rpc/status.py has the status of each."""

from __future__ import annotations

from storage.errors import StorageError


class UnavailableError(StorageError):
    """The daemon does not serve this now, and another attempt, perhaps with the next daemon, may be served."""


class LateError(StorageError):
    """The time that the client allows the call is about to be over; the message says what the call waits for."""


class StartError(StorageError):
    """The daemon cannot start on this machine as it is configured; the message says what to change."""


class ConfigError(Exception):
    """The configuration is wrong; the message names the key, the value and what is allowed."""


class TransferStalledError(StorageError):
    """A client neither takes nor gives the bytes that it asked to move."""
