"""The yardstick for the data plane between nodes: one TCP connection that moves bytes between two processes.

Both processes read from and write into preallocated memory, and do nothing else. The far process is this module:
`python -m benchmarks.dataplane.bare_tcp SIZE_BYTES`.
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_GET, _PUT, _DONE = b"g", b"p", b"d"


class BareTcp:
    """The benchmark's end. Each `get` and `put` opens a connection and moves as many bytes as the buffer has."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, buffer: memoryview) -> None:
        with self._connect(_GET) as connection:
            _receive(connection, buffer)

    def put(self, buffer: memoryview) -> None:
        with self._connect(_PUT) as connection:
            connection.sendall(buffer)
            if connection.recv(1) != _DONE:
                raise ConnectionError("the far end has not taken all bytes")

    def _connect(self, order: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(order)
        return connection


@contextmanager
def far_end(size_bytes: int) -> Iterator[BareTcp]:
    """Start the far process, yield the near end, and kill the process at the end of the block."""
    command = [sys.executable, "-m", "benchmarks.dataplane.bare_tcp", str(size_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield BareTcp(int(process.stdout.readline()))
        finally:
            process.kill()


def serve(size_bytes: int) -> None:
    """Print the port of this far process, then serve `get` and `put` until it is killed."""
    buffer = memoryview(mmap.mmap(-1, size_bytes))
    buffer[:] = b"\x01" * size_bytes
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                if connection.recv(1) == _GET:
                    connection.sendall(buffer)
                else:
                    _receive(connection, buffer)
                    connection.sendall(_DONE)


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    received = 0
    while received < len(buffer):
        nbytes = connection.recv_into(buffer[received:])
        if not nbytes:
            raise ConnectionError(f"the connection ended after {received} of {len(buffer)} bytes")
        received += nbytes


if __name__ == "__main__":
    serve(int(sys.argv[1]))
