"""The work of `paramserver-admin copy`, `backup` and `restore`, with a connection to each daemon that they name.

The tool's own package lies below this one, and imports this module when one of these verbs is called.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer_client.copying.backup import BackupResult, BackupStep, back_up
from trainer_client.copying.description import Progress
from trainer_client.copying.put_step import CopyResult, copy_step, put_step
from trainer_client.errors import ConfigError, TrainerClientError
from trainer_client.store_client.connection import Connection
from trainer_client.transport.credentials import Credentials

__all__ = ["ConfigError", "TrainerClientError", "backup", "copy", "credentials", "restore"]

_OnProgress = Callable[[Progress], None]


def credentials(
    *, token_file: Path | None, tls_ca: Path | None, tls_certificate: Path | None, tls_key: Path | None, insecure: bool
) -> Credentials:
    """Return the credentials for a daemon. Raise ConfigError if only some of the TLS files are given."""
    return Credentials(
        token_file=token_file, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key, insecure=insecure
    )


def copy(
    job: str,
    origin: str,
    target: str,
    *,
    step: int | None,
    kept: str | None,
    origin_credentials: Credentials,
    target_credentials: Credentials,
    on_progress: _OnProgress,
) -> CopyResult:
    """Copy a step between the daemons at two addresses; see copy_step."""
    with _connected(origin, origin_credentials) as source, _connected(target, target_credentials) as sink:
        return copy_step(source, sink, job, step=step, kept=kept, on_progress=on_progress)


def backup(
    job: str,
    address: str,
    destination: str,
    *,
    step: int | None,
    kept: str | None,
    keep_last: int | None,
    credentials: Credentials,
    on_progress: _OnProgress,
) -> BackupResult:
    """Back a step up; see back_up."""
    with _connected(address, credentials) as source:
        return back_up(source, job, destination, step=step, kept=kept, keep_last=keep_last, on_progress=on_progress)


def restore(
    job: str, place: str, address: str, *, step: int | None, credentials: Credentials, on_progress: _OnProgress
) -> CopyResult:
    """Put a step of a backup into the daemon at an address; see put_step."""
    source = BackupStep(place, job, step)
    with _connected(address, credentials) as target:
        return put_step(source, target, on_progress=on_progress)


@contextlib.contextmanager
def _connected(address: str, credentials: Credentials) -> Iterator[Connection]:
    """Yield a connection to a daemon, and close it. Raise ConfigError for an address or credentials of no use."""
    client = f"paramserver-admin at {socket.gethostname()}, process {os.getpid()}"
    connection = Connection(address, client, credentials, prefer_streams=False)
    try:
        yield connection
    finally:
        connection.close()
