"""The store's shared memory in this process: a client that can map it reads and writes tensors without sending them.

Owns the mapping. Must never touch a byte outside a lease.
"""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import suppress

import torch

from paramserver.v1 import parameter_store_pb2 as pb

_CONNECT_TIMEOUT_SECONDS = 5.0


class Arena:
    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @classmethod
    def map(cls, description: pb.Arena) -> Arena | None:
        """Maps the arena; None where it cannot be the daemon's (another node, another mount of the same path).

        The proof of locality is the nonce in the first bytes, not a host name.
        """
        with suppress(OSError, ValueError):
            descriptor = _receive_descriptor(description.socket_path)
            try:
                mapping = mmap.mmap(descriptor, description.size_bytes)
            finally:
                os.close(descriptor)
            if mapping[: len(description.nonce)] == description.nonce:
                return cls(torch.frombuffer(mapping, dtype=torch.uint8))
        return None

    def view(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + size_bytes) of the arena, uint8, shared with the store."""
        return self._memory[offset : offset + size_bytes]


def _receive_descriptor(socket_path: str) -> int:
    """The descriptor that the daemon sends with one byte to whoever connects. OSError if it does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_SECONDS)
        connection.connect(socket_path)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError(f"{socket_path} sent no file descriptor")
    return descriptors[0]
