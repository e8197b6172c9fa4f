"""The store's shared memory in this process: a client that can map it reads and writes tensors without sending them.

Owns the mapping, and the record lock by which the store knows that this process may still write (see `message Arena` in
the wire contract). Must never touch a byte outside a lease.

[Note: one mapping for an arena] POSIX record locks belong to the process, and all that it has on a file are gone as
soon as it closes any descriptor of that file. Sessions of one process therefore share one mapping and its descriptors,
which stay open until the last session has let go. A forked child has none of the locks: it must leave leases alone.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import torch

from paramserver.contract.sockets import system_path
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import SessionEndedError, StoreUnavailableError
from trainer_client.transport.mapping import FileRange, map_file

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_SECONDS = 5.0
_WORD_BYTES = 8
_Inode = tuple[int, int]  # device and number


class _Mapping:
    """A mapped arena and the sessions that use it; see [Note: one mapping for an arena]."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.memory = map_file(descriptor, size_bytes)
        self.descriptors = [descriptor]
        self.users = 0


_mappings: dict[_Inode, _Mapping] = {}
# Reentrant: the garbage collector may let go of an arena at any point.
_guard = threading.RLock()


class Arena:
    """One session's right to the mapped arena, as `map` gives it. It lasts until `close` was called and nobody holds a
    view any more."""

    def __init__(self, mapping: _Mapping, memory: memoryview, description: pb.Arena) -> None:
        self._tensor: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._word = memoryview(mapping.memory)[description.generation_offset :][:_WORD_BYTES].cast("Q")
        self._generation = description.generation
        self._descriptor = mapping.descriptors[0]
        # In huge pages, a mapping begins and ends at one of them: leases do not.
        self._has_ordinary_pages = os.fstatvfs(self._descriptor).f_bsize == mmap.PAGESIZE

    @classmethod
    def map(cls, description: pb.Arena) -> Arena | None:
        """Maps the arena; None where it cannot be the daemon's (another node, another mount of the same path), or this
        session may not.

        The proof of locality is the nonce in the first bytes, not a host name.

        Raises:
            SessionEndedError: the session was over before the arena was mapped.
        """
        if not description.generation_offset:
            return None
        inode = _find(description) or next(filter(None, map(partial(_open, description), _ways_to(description))), None)
        return _enter(inode, description) if inode else None

    def view(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + size_bytes) of the arena, uint8, shared with the store.

        Raises:
            StoreUnavailableError: the arena is closed, because another thread has found the session ended or closed it.
        """
        if self._tensor is None:
            # No RuntimeError: torch raises it where memory is exhausted, which is no reason to connect again.
            raise StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed")
        return self._tensor[offset : offset + size_bytes]

    def file_range(self, offset: int) -> FileRange | None:
        """The bytes from `offset` on, as they can be mapped once more as long as somebody holds a view; None: memory
        in huge pages, where that cannot be."""
        return FileRange(descriptor=self._descriptor, offset=offset) if self._has_ordinary_pages else None

    def check(self) -> None:
        """To be called after bytes of a lease were copied or computed with, before the result is used.

        Raises:
            SessionEndedError: the session is over; what was read may be somebody else's bytes.
        """
        if self._word[0] != self._generation:
            raise session_ended()

    def close(self) -> None:
        """Lets go of the memory, as soon as nobody holds a view of it; idempotent."""
        self._tensor = None


def session_ended() -> SessionEndedError:
    """What a process is told that finds its session ended."""
    return SessionEndedError(
        grpc.StatusCode.NOT_FOUND,
        "this process was silent, or its connection broken, for longer than the store waits: its leases are void, and "
        "what it had half written is discarded; open a new session, which means for a trainer: restart the job, it "
        "resumes from the last commit",
    )


def _ways_to(description: pb.Arena) -> Iterator[Callable[[], int]]:
    """How to get a descriptor of the arena's file."""
    if description.socket_path:
        yield partial(_receive_descriptor, description.socket_path)
    if description.file_path:
        yield partial(os.open, description.file_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def _receive_descriptor(socket_path: str) -> int:
    """The descriptor that the daemon sends with one byte to whoever connects. OSError if it does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_SECONDS)
        connection.connect(system_path(Path(socket_path)))
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise OSError(f"{socket_path} sent no file descriptor")
    return descriptors[0]


def _find(description: pb.Arena) -> _Inode | None:
    """The arena, where another session of this process has mapped it already."""
    with _guard:
        return next((inode for inode, mapping in _mappings.items() if _is_it(mapping, description)), None)


def _is_it(mapping: _Mapping, description: pb.Arena) -> bool:
    memory = mapping.memory
    return len(memory) == description.size_bytes and memory[: len(description.nonce)] == description.nonce


def _open(description: pb.Arena, receive: Callable[[], int]) -> _Inode | None:
    """Maps what comes one way, if it is the arena."""
    try:
        descriptor = receive()
    except OSError as error:
        log.debug("the arena cannot be reached this way: %s", error)
        return None
    with _guard:
        status = os.fstat(descriptor)
        inode = status.st_dev, status.st_ino
        if known := _mappings.get(inode):
            # Another session came first. Closing this one would take its lock away.
            known.descriptors.append(descriptor)
            return inode if _is_it(known, description) else None
        try:
            mapping = _Mapping(descriptor, description.size_bytes)
        except (OSError, ValueError) as error:
            log.debug("what was found is not the arena: %s", error)
            os.close(descriptor)
            return None
        if not _is_it(mapping, description):
            os.close(descriptor)
            return None
        _mappings[inode] = mapping
        return inode


def _enter(inode: _Inode, description: pb.Arena) -> Arena | None:
    """Takes the session's lock in a mapped arena."""
    offset = description.generation_offset
    with _guard:
        mapping = _mappings.get(inode)
        if mapping is None:
            return None  # its last session has let go of it just now
        mapping.users += 1
        memory = memoryview(mapping.memory)
        # Every view of the arena is made from this object and keeps it alive.
        weakref.finalize(memory, _leave, inode, offset).atexit = False
        try:
            fcntl.lockf(mapping.descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except OSError as error:
            log.warning("the arena is not mapped, bytes go through streams: its slot cannot be locked (%s)", error)
            return None
        arena = Arena(mapping, memory, description)
    # Not before the lock: until then, nothing kept the store from giving the slot to another session.
    arena.check()
    return arena


def _leave(inode: _Inode, offset: int) -> None:
    """Nobody of a session can write to the arena any more."""
    with _guard:
        mapping = _mappings[inode]
        fcntl.lockf(mapping.descriptors[0], fcntl.LOCK_UN, 1, offset)
        mapping.users -= 1
        if not mapping.users:
            del _mappings[inode]
            for descriptor in mapping.descriptors:
                os.close(descriptor)
