"""The arena is mapped exactly where its nonce is found."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.arena import Arena

SIZE = 1 << 16


@contextmanager
def served_memory(path: Path, content: bytes) -> Iterator[int]:
    """A descriptor of shared memory that one client gets at the socket."""
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, SIZE)
    os.pwrite(descriptor, content, 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(connection, [b"\0"], [descriptor])

        thread = threading.Thread(target=serve)
        thread.start()
        yield descriptor
        thread.join()
    os.close(descriptor)


def test_views_are_the_shared_memory_itself(tmp_path: Path) -> None:
    path = tmp_path / "arena.sock"
    with served_memory(path, b"nonce") as descriptor:
        arena = Arena.map(pb.Arena(socket_path=str(path), nonce=b"nonce", size_bytes=SIZE))
        assert arena is not None

        arena.view(4096, 8).view(torch.float32).copy_(torch.tensor([1.0, 2.0]))

        assert os.pread(descriptor, 8, 4096) == torch.tensor([1.0, 2.0]).numpy().tobytes()


def test_another_nonce_is_another_nodes_arena(tmp_path: Path) -> None:
    path = tmp_path / "arena.sock"
    with served_memory(path, b"other"):
        assert Arena.map(pb.Arena(socket_path=str(path), nonce=b"nonce", size_bytes=SIZE)) is None


def test_no_socket_is_another_node(tmp_path: Path) -> None:
    assert Arena.map(pb.Arena(socket_path=str(tmp_path / "none"), nonce=b"n", size_bytes=SIZE)) is None
