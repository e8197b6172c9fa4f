"""Hands the arena's file descriptor to clients of this node, over a UNIX socket that only this user can open."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

log = logging.getLogger(__name__)


class ArenaDoor:
    """A listening socket; each connection gets one byte with the descriptor, and is closed."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._task = asyncio.ensure_future(self._serve())

    async def close(self) -> None:
        """Stops listening."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._listener.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            with connection:
                try:
                    # One byte into an empty socket buffer: this cannot block.
                    socket.send_fds(connection, [b"a"], [self._fd])
                except OSError as error:
                    log.warning("a client left before it got the arena: %s", os.strerror(error.errno or 0))
