"""The UNIX socket that hands the arena's file descriptor to clients of this node; only the daemon's user can open it.

The kernel names the user of the connecting process. A process of another user than the daemon's or root gets nothing,
even if the mode of the socket was changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path

from paramserver.contract.sockets import system_path
from paramserver.errors import StartError
from paramserver.process.background import repeat
from paramserver.process.socket_file import SocketFile

log = logging.getLogger(__name__)

# The daemon's pause after the kernel refused to accept a client of the arena's socket, for example because the process
# has no free descriptor. Clients that connect meanwhile wait in the socket's backlog.
RETRY_SECONDS = 0.2


class ArenaSocket:
    """A listening socket at `path`. It sends each client one byte with the descriptor `fd`."""

    def __init__(self, path: Path, fd: int) -> None:
        """Listen at `path`, which `clear_socket` has found free.

        Raises:
            StartError: there can be no socket at `path`.
        """
        self._file = SocketFile(path)
        self._fd = fd
        # The ids of the users whom this socket has refused. A user's first refusal is logged, and later ones are not.
        self._refused: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(system_path(self._file.bound_at))
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._file.publish()
        except OSError as error:
            self._listener.close()
            raise StartError(
                f"cannot listen on socket {path}: {error.strerror}; correct `socket` (--socket)"
            ) from error
        except StartError:
            self._listener.close()
            raise
        self._task = asyncio.ensure_future(self._serve())

    async def close(self) -> None:
        """Remove the socket, and stop listening."""
        self._file.remove()
        self._task.cancel()
        await asyncio.wait([self._task])
        self._listener.close()

    async def _serve(self) -> None:
        await repeat("to hand out the arena", RETRY_SECONDS, self._hand_out)

    async def _hand_out(self) -> None:
        """Accept clients one after the other, and send each one the descriptor of the arena.

        Raise OSError if the kernel refuses to accept a connection.
        """
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            with connection:
                try:
                    if (uid := _peer_uid(connection)) not in (os.getuid(), 0):
                        self._refuse(uid)
                        continue
                    # `send_fds` does not block the event loop, because the send buffer of a new connection has room for
                    # one byte.
                    socket.send_fds(connection, [b"a"], [self._fd])
                except OSError as error:
                    log.warning("a client left before it got the arena: %s", os.strerror(error.errno or 0))

    def _refuse(self, uid: int) -> None:
        if uid not in self._refused:
            log.warning("refused the arena to user %d: it is for user %d and root only", uid, os.getuid())
            self._refused.add(uid)


def _peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of the connection; see SO_PEERCRED in man 7 unix."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
