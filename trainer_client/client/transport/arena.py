"""The arena, which is the store's shared memory, in this process. A client that maps it sends no tensors over gRPC.

This module owns the mapping, and the record lock that shows the store that this process may still write (see `message
Arena` in parameter_store.proto). It must never touch a byte outside of a lease, nor let a lock go while a device may
still copy.

[Note: one mapping for an arena] POSIX record locks belong to a process. When a process closes any descriptor of a file,
the kernel releases all locks that the process holds on that file. Sessions of one process therefore share one mapping
and its descriptors, which stay open until the last session has released the mapping. A forked child inherits none of
the locks, so it must not use leases.

[Note: leaving] When the last view of a session's arena is gone, its lock is released. A view that the garbage collector
has taken says nothing about copies that the device has not done yet. So where the arena is registered with a device
(pinning.py), a thread first waits for the device, ends the registrations after the last session, writes the word that
tells the daemon that the session has left the arena, and only then releases the lock. It is a thread because the
garbage collector may run in any thread and at any time, and because a device that hangs must not hang `close`. If the
device cannot be waited for, the lock stays until the process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import torch

from paramserver.contract.sockets import system_path
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.mapping import FileRange, map_file
from trainer_client.client.transport.pinning import PinDriver, PinError, Pins
from trainer_client.errors import SessionEndedError, StoreUnavailableError

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_SECONDS = 5.0
_WORD_BYTES = 8
# The time for which `MappedArena.close` waits until the device has done its copies and the registrations have ended.
_LEAVE_SECONDS = 10.0
# The file of an arena, identified by (device, inode number).
_Inode = tuple[int, int]


class _Mapping:
    """A mapped arena and the number of sessions that use it; see [Note: one mapping for an arena].

    Attributes:
        users: the number of sessions.
        strangers: the number of those sessions that have not told the daemon that this process may register the arena.
        pins: the registrations with a device; None: there are none.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.memory = map_file(descriptor, size_bytes)
        self.descriptors = [descriptor]
        self.users = 0
        self.strangers = 0
        self.pins: Pins | None = None

    def pin(self, driver: PinDriver, description: pb.Arena) -> None:
        """Begin to register the mapping with the device of `driver`.

        Do nothing if the registration has begun already, or if the daemon does not expect it.
        """
        if self.pins is not None:
            return
        if self.strangers or not description.settled_offset:
            log.warning(
                "the store's shared memory is not registered with the device, so copies are slow: %s",
                "a session of this process began before; open it after the trainer's engine"
                if self.strangers
                else "the daemon is older than this program",
            )
            return
        settled = memoryview(self.memory)[description.settled_offset :][:_WORD_BYTES].cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.pins = Pins(driver, address, len(self.memory), lambda: int(settled[0]), description.piece_bytes)


_mappings: dict[_Inode, _Mapping] = {}
# The lock that guards `_mappings`. It is reentrant because the garbage collector may call `_Leaving.begin` in a thread
# that holds the lock.
_guard = threading.RLock()


class Generation:
    """The word in the arena that the daemon changes when it ends a session, and the value that the session was given.

    The word stays mapped as long as this object lives. After the death of a daemon, neither its word nor the bytes of
    its arena change again.
    """

    __slots__ = ("_given", "_word")

    def __init__(self, word: memoryview, given: int) -> None:
        self._word = word
        self._given = given

    def check(self) -> None:
        """Raise SessionEndedError if the daemon has ended the session, which it shows by changing the word."""
        if self._word[0] != self._given:
            raise session_ended()

    def copy(self) -> Generation:
        """Return an object that keeps no memory mapped. Its `check` always does what this one's would do now."""
        return Generation(memoryview(self._word.tobytes()).cast("Q"), self._given)


class MappedArena:
    """The mapped arena of one session; `map` makes it.

    It stays mapped until `close` has been called and the last view of it is gone.

    Attributes:
        pins: the registrations with a device; None: the arena is not registered.
    """

    def __init__(self, mapping: _Mapping, memory: memoryview, description: pb.Arena, leaving: _Leaving) -> None:
        self._tensor: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._leaving = leaving
        self.pins = mapping.pins
        word = memoryview(mapping.memory)[description.generation_offset :][:_WORD_BYTES].cast("Q")
        self._generation: Generation | None = Generation(word, description.generation)
        self._descriptor = mapping.descriptors[0]
        self._size_bytes = len(mapping.memory)
        # Whether the arena's file has pages of ordinary size. In a file of huge pages, a mapping has to begin and end
        # at a huge page, which leases do not, so the bytes of a single lease cannot be mapped there.
        self._has_ordinary_pages = os.fstatvfs(self._descriptor).f_bsize == mmap.PAGESIZE

    @classmethod
    def map(
        cls, description: pb.Arena, driver: PinDriver | None = None, *, is_announced: bool = False
    ) -> MappedArena | None:
        """Map the arena that the daemon's Welcome message describes, and begin to register it if there is a `driver`.

        `is_announced` says whether the session has told the daemon that this process may register the arena.

        Return None if this session may not map it, or if the file that this process finds is not the daemon's arena, as
        on another node or with another mount at the same path. The nonce in the arena's first bytes decides that, not a
        host name.

        Raises:
            SessionEndedError: the session ended before the arena was mapped.
        """
        if not description.generation_offset:
            return None
        inode = _find(description) or next(filter(None, map(partial(_open, description), _ways_to(description))), None)
        return _lock_slot(inode, description, driver, is_announced=is_announced) if inode else None

    def view(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return bytes [offset, offset + size_bytes) of the arena as a uint8 tensor that shares the store's memory.

        Raises:
            StoreUnavailableError: the arena is closed, because another thread has closed the session or found it ended.
        """
        if self._tensor is None:
            raise _session_closed()
        return self._tensor[offset : offset + size_bytes]

    def file_range(self, offset: int) -> FileRange | None:
        """Return the file range from `offset` on, for a second mapping of it.

        The range may be used while a view of the arena exists. Return None if the arena is in a file of huge pages,
        because leases do not begin at huge pages.
        """
        return FileRange(descriptor=self._descriptor, offset=offset) if self._has_ordinary_pages else None

    def map_privately(self) -> memoryview | None:
        """Map the whole arena once more, for reading, and return the view, which lasts as long as it is referenced.

        A write through it stays in this process. Return None if the arena is in a file of huge pages, because written
        pages of such a mapping cannot be discarded one by one.
        """
        return map_file(self._descriptor, self._size_bytes, is_private=True) if self._has_ordinary_pages else None

    def check(self) -> None:
        """Check that the session had not ended while bytes of its leases were read.

        Call this after the bytes were copied or computed with, and before the result is used.

        Raises:
            SessionEndedError: the session has ended, so the bytes may have been those of another session.
            StoreUnavailableError: the arena is closed, because another thread has closed the session.
        """
        self.generation().check()

    def generation(self) -> Generation:
        """Return the Generation of the session, with which bytes can be checked after the session was closed.

        Raises:
            StoreUnavailableError: the arena is closed, because another thread has closed the session.
        """
        # Another thread may call `close` meanwhile, which sets `_generation` to None. So the attribute is read only
        # once.
        if (generation := self._generation) is None:
            raise _session_closed()
        return generation

    def let_go(self) -> None:
        """Give up this session's mapping without waiting, because its daemon is gone.

        The mapping ends when the last view of it is gone. Until then, `check` always does what it would do now,
        because no daemon changes the word any more.
        """
        self._tensor = None
        if self._generation is not None:
            self._generation = self._generation.copy()

    def close(self) -> None:
        """Release the mapping, which ends when the last view of it is gone; idempotent.

        So the mapping ends even if this object lives on in a closed engine or client that the user keeps. If no view is
        left, this waits until the device has done its copies and the lock is released.
        """
        self._tensor = None
        self._generation = None
        self.pins = None
        if self._leaving.has_begun and not self._leaving.over.wait(_LEAVE_SECONDS):
            log.warning(
                "the device has not finished its copies from and to the store's memory after %g s; the store does not "
                "use the memory that this process was writing to before this process ends",
                _LEAVE_SECONDS,
            )


def _session_closed() -> StoreUnavailableError:
    # This error is not a RuntimeError, because torch raises RuntimeError if memory is exhausted. Callers connect again
    # when a session has ended, which would not help against exhausted memory. See tests/integration/test_failures.py.
    return StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed")


def session_ended() -> SessionEndedError:
    """Return the error to raise if the store has ended the client's session."""
    return SessionEndedError(
        grpc.StatusCode.NOT_FOUND,
        "this process was silent, or its connection broken, for longer than the store waits: its leases are void, and "
        "what it had half written is discarded; open a new session, which means for a trainer: restart the job, it "
        "resumes from the last commit",
    )


def _ways_to(description: pb.Arena) -> Iterator[Callable[[], int]]:
    """Yield functions, each of which tries another way to open the arena's file, and returns its descriptor."""
    if description.socket_path:
        yield partial(_receive_descriptor, description.socket_path)
    if description.file_path:
        yield partial(os.open, description.file_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def _receive_descriptor(socket_path: str) -> int:
    """Connect to the daemon's socket, and return the file descriptor that it sends with one byte.

    It can raise OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_SECONDS)
        connection.connect(system_path(Path(socket_path)))
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise OSError(f"{socket_path} sent no file descriptor")
    return descriptors[0]


def _find(description: pb.Arena) -> _Inode | None:
    """Return the arena's file if another session of this process has mapped it already, else None."""
    with _guard:
        # During this iteration the garbage collector may end the last view of another session's arena, which removes an
        # entry from `_mappings`. So the iteration runs over a copy.
        found = _mappings.copy().items()
        return next((inode for inode, mapping in found if _is_it(mapping, description)), None)


def _is_it(mapping: _Mapping, description: pb.Arena) -> bool:
    memory = mapping.memory
    return len(memory) == description.size_bytes and memory[: len(description.nonce)] == description.nonce


def _open(description: pb.Arena, receive: Callable[[], int]) -> _Inode | None:
    """Map the file that `receive` opens, and return it; None if it cannot be opened or is not the arena."""
    try:
        descriptor = receive()
    except OSError as error:
        log.debug("the arena cannot be reached this way: %s", error)
        return None
    with _guard:
        status = os.fstat(descriptor)
        inode = status.st_dev, status.st_ino
        if known := _mappings.get(inode):
            # Another session of this process has mapped the same file. The new descriptor is kept open, because the
            # kernel would drop the other session's lock of the file if this process closed any descriptor of the file.
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


class _Leaving:
    """What one session does when it stops using the arena: it releases its lock; see [Note: leaving].

    Attributes:
        has_begun: whether the last view of the session's arena is gone.
        over: set when the lock is released, or when it is certain that the lock stays until the process ends.
    """

    def __init__(self, inode: _Inode, description: pb.Arena, *, is_announced: bool) -> None:
        self.has_begun = False
        self.over = threading.Event()
        self._inode = inode
        self._offset = description.generation_offset
        self._generation = description.generation
        self._is_announced = is_announced

    def begin(self) -> None:
        """Release the lock once the device has done its copies; called when the last view of the arena is gone."""
        self.has_begun = True
        with _guard:
            pins = _mappings[self._inode].pins
            if pins is None:
                self._unlock()
                return
        # If Python can start no thread, the interpreter is about to end, so the RuntimeError is ignored: the kernel
        # releases the slot's lock with the process.
        with suppress(RuntimeError):
            threading.Thread(target=self._leave, args=(pins,), name="paramserver-leave", daemon=True).start()

    def _leave(self, pins: Pins) -> None:
        try:
            pins.synchronize()
        except PinError as error:
            log.warning(
                "the store's memory stays locked until this process ends: the device does not answer: %s", error
            )
            self.over.set()
            return
        with _guard:
            self._unlock()

    def _unlock(self) -> None:
        """Unlock the session's slot; after its last session, end the registrations and unmap the arena."""
        mapping = _mappings[self._inode]
        mapping.users -= 1
        mapping.strangers -= not self._is_announced
        if not mapping.users and mapping.pins is not None:
            mapping.pins.close()
        end = self._offset + _WORD_BYTES
        memoryview(mapping.memory)[end : end + _WORD_BYTES] = self._generation.to_bytes(_WORD_BYTES, "little")
        fcntl.lockf(mapping.descriptors[0], fcntl.LOCK_UN, 1, self._offset)
        if not mapping.users:
            del _mappings[self._inode]
            for descriptor in mapping.descriptors:
                os.close(descriptor)
        self.over.set()


def _lock_slot(
    inode: _Inode, description: pb.Arena, driver: PinDriver | None, *, is_announced: bool
) -> MappedArena | None:
    """Lock the session's slot in a mapped arena, and return the arena; None if the session cannot use it."""
    with _guard:
        mapping = _mappings.get(inode)
        if mapping is None:
            # The last session that used this mapping of the arena has released it since `map` found or made it. So
            # there is no mapping to return.
            return None
        if mapping.pins is not None and not is_announced:
            log.debug("the arena is not mapped: it was registered after this session had begun")
            return None
        mapping.users += 1
        mapping.strangers += not is_announced
        memory = memoryview(mapping.memory)
        # Every view of the arena is made from this memoryview and keeps it alive, so the memoryview's finalizer runs
        # when the last view is gone.
        leaving = _Leaving(inode, description, is_announced=is_announced)
        weakref.finalize(memory, leaving.begin).atexit = False
        try:
            fcntl.lockf(mapping.descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, description.generation_offset)
        except OSError as error:
            log.warning("the arena is not mapped, bytes go through streams: its slot cannot be locked (%s)", error)
            return None
        if driver is not None and is_announced:
            mapping.pin(driver, description)
        arena = MappedArena(mapping, memory, description, leaving)
    # Only after the slot is locked, this checks that the session still exists, because the store may give an unlocked
    # slot to another session.
    arena.check()
    return arena
