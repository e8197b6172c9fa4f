"""A proxy on a UNIX socket before another one, which breaks connections or changes bytes, for tests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

# A function from the bytes that arrive to the bytes to forward. If it returns none, the connection breaks.
Tamper = Callable[[bytes], bytes]


class TamperingProxy:
    """A proxy that passes the bytes of all connections, in both directions, through `tamper`."""

    def __init__(self, path: Path, target: Path, tamper: Tamper) -> None:
        self.address = f"unix:{path}"
        self._target = str(target)
        self._tamper = tamper
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def __enter__(self) -> TamperingProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for end in [self._listener, *self._ends]:
            _shut(end)
        for thread in self._threads:
            thread.join()
        for end in [self._listener, *self._ends]:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                self._ends += [client, server]
                server.connect(self._target)
                self._start(partial(self._pump, client, server))
                self._start(partial(self._pump, server, client))

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (data := source.recv(1 << 18)) and (data := self._tamper(data)):
                target.sendall(data)
        _shut(source)
        _shut(target)

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()


class CutAfter:
    """A Tamper that breaks the connection whenever `nbytes` more bytes have passed, at most `times` times."""

    def __init__(self, nbytes: int, times: int) -> None:
        self._lock = threading.Lock()
        self._step = nbytes
        self._left = nbytes
        self.times = times

    def __call__(self, data: bytes) -> bytes:
        with self._lock:
            self._left -= len(data)
            if self._left > 0 or not self.times:
                return data
            self._left = self._step
            self.times -= 1
            return b""


def flip_a_bit_of(pattern: bytes) -> Tamper:
    """Return a Tamper that flips a bit of each piece that contains `pattern`."""
    damaged = bytes([pattern[0] ^ 1]) + pattern[1:]
    return lambda data: data.replace(pattern, damaged, 1)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
