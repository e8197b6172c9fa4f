"""The file of a UNIX socket that this daemon listens on: it appears when the socket listens, and goes with the daemon.

A directory may be moved or made anew under a daemon that runs, and another daemon may listen at the same path then. So
this module must never remove a file that it has not put there itself.

gRPC removes the file at the path to which it has bound a socket, also if the file is another one by then. Therefore a
socket is bound at a path of its own, and gets its place by a rename, after which gRPC finds nothing to remove.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from paramserver.contract.sockets import system_path
from paramserver.errors import StartError
from storage.base.errors import ConflictError

# A socket is first bound at a temporary name made of this many random bytes. The temporary name is short, so it fits
# wherever the socket's own name fits.
_NAME_BYTES = 4


def clear_socket(path: Path) -> None:
    """Check that a socket can be put at `path`: there is nothing, or the socket of a daemon that was killed.

    Raises:
        ConflictError: another process listens on the socket.
        StartError: `path` exists and is not a socket.
    """
    if not path.exists():
        return
    if not path.is_socket():
        raise StartError(f"cannot listen on socket {path}: it exists and is no socket; correct `socket` (--socket)")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(system_path(path))
        except ConnectionRefusedError:
            return
    raise ConflictError(f"socket {path} is in use by another daemon; set `socket` (--socket) to another path")


class SocketFile:
    """The file at `path`. Bind the socket to `bound_at`, let it listen, and call `publish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bound_at = path.with_name(f".{secrets.token_hex(_NAME_BYTES)}")
        self._status: os.stat_result | None = None

    def publish(self) -> None:
        """Rename the socket to `path`, with access for this user only, in place of a socket of a killed daemon.

        Raises:
            StartError: the directory cannot be written to.
        """
        try:
            self.bound_at.chmod(0o600)
            self._status = self.bound_at.stat()
            self.bound_at.replace(self.path)
        except OSError as error:
            self.bound_at.unlink(missing_ok=True)
            raise StartError(
                f"cannot listen on socket {self.path}: {error.strerror}; correct `socket` (--socket)"
            ) from error

    def remove(self) -> None:
        """Remove the file, if it is still the one that was published. A repeated call has no effect."""
        status, self._status = self._status, None
        try:
            if status is not None and os.path.samestat(status, self.path.stat()):
                self.path.unlink()
        except OSError:
            # The socket's file or its directory is gone already, so there is no file to remove.
            return
