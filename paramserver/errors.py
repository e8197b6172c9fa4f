"""The errors of the daemon itself, beside those of storage/errors.py; rpc/status.py maps both to gRPC status codes."""

from __future__ import annotations

from storage.errors import StorageError


class UnavailableError(StorageError):
    """The daemon cannot serve this request now; the same request can succeed later, or after a restart."""


class LateError(StorageError):
    """The deadline of the call is about to pass; the message says what the call waits for."""


class StartError(StorageError):
    """The daemon cannot start on this machine as it is configured; the message says what to change."""


class ConfigError(Exception):
    """The configuration is wrong; the message names the key, the value and what is allowed."""


class TransferStalledError(StorageError):
    """A client opened a transfer, and neither takes the bytes that it asked for nor sends those that it announced."""
