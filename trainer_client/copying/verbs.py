"""The verbs `paramserver-admin copy`, `backup` and `restore`, with a connection to each daemon that they name.

The command `paramserver-admin` finds these functions as entry points (paramserver/contract/client_verbs.py), and parses
their options. Each function returns the result that the command prints, or raises VerbError. Credentials are given as a
mapping of the fields of `Credentials`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paramserver.contract.client_verbs import VerbError
from trainer_client.client.store_client.connection import Connection
from trainer_client.client.transport.credentials import Credentials
from trainer_client.copying.backup import BackupResult, BackupStep, back_up
from trainer_client.copying.description import CopyProgress
from trainer_client.copying.put_step import CopyResult, copy_step, put_step
from trainer_client.errors import ConfigError, TrainerClientError

_OnProgress = Callable[[CopyProgress], None]


@contextlib.contextmanager
def _verb_errors() -> Iterator[None]:
    """Raise a VerbError, which the command `paramserver-admin` prints, in place of an error of this library."""
    try:
        yield
    except TrainerClientError as error:
        raise VerbError(str(error), is_usage=isinstance(error, ConfigError)) from None


@_verb_errors()
def copy(
    job: str,
    origin: str,
    target: str,
    *,
    step: int | None,
    kept: str | None,
    credentials: Mapping[str, Any],
    target_credentials: Mapping[str, Any],
    on_progress: _OnProgress,
) -> CopyResult:
    """Copy a step of a job from the daemon at `origin` to the daemon at `target`; see copy_step."""
    with _connected(origin, credentials) as source, _connected(target, target_credentials) as sink:
        return copy_step(source, sink, job, step=step, kept=kept, on_progress=on_progress)


@_verb_errors()
def backup(
    job: str,
    address: str,
    destination: str,
    *,
    step: int | None,
    kept: str | None,
    keep_last: int | None,
    credentials: Mapping[str, Any],
    on_progress: _OnProgress,
) -> BackupResult:
    """Write a step of a job in the daemon at `address` into the backup at `destination`; see back_up."""
    with _connected(address, credentials) as source:
        return back_up(source, job, destination, step=step, kept=kept, keep_last=keep_last, on_progress=on_progress)


@_verb_errors()
def restore(
    job: str, place: str, address: str, *, step: int | None, credentials: Mapping[str, Any], on_progress: _OnProgress
) -> CopyResult:
    """Put a step of the backup at `place` into the daemon at `address`; see put_step."""
    source = BackupStep(place, job, step)
    with _connected(address, credentials) as target:
        return put_step(source, target, on_progress=on_progress)


@contextlib.contextmanager
def _connected(address: str, credentials: Mapping[str, Any]) -> Iterator[Connection]:
    """Yield a connection to a daemon, and close it. Raise ConfigError for a wrong address or wrong credentials."""
    client = f"paramserver-admin at {socket.gethostname()}, process {os.getpid()}"
    connection = Connection(address, client, Credentials(**credentials), prefer_streams=False)
    try:
        yield connection
    finally:
        connection.close()
