"""A proxy on a UNIX socket before another one. It can break all its connections, and refuse new ones."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path


class Cutter:
    """A proxy that forwards bytes until `cut` breaks its connections. With `refusing` it closes new ones at once."""

    def __init__(self, path: Path, target: Path) -> None:
        self.address = f"unix:{path}"
        self.refusing = False
        self._target = str(target)
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def __enter__(self) -> Cutter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.refusing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def cut(self) -> None:
        """Break all present connections."""
        with self._guard:
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refusing:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._target)
                with self._guard:
                    self._open |= {client, server}
                ends = threading.Barrier(2, action=partial(self._close, client, server))
                self._start(partial(self._pump, client, server, ends))
                self._start(partial(self._pump, server, client, ends))

    def _pump(self, source: socket.socket, target: socket.socket, ends: threading.Barrier) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        ends.wait()

    def _close(self, *ends: socket.socket) -> None:
        with self._guard:
            self._open.difference_update(ends)
        for end in ends:
            end.close()

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()
