"""A client maps an arena only if the file has the arena's nonce, and its lock lasts as long as the client can write.

All sessions of a process share one mapping.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport import arena as arena_module
from trainer_client.client.transport.arena import MappedArena
from trainer_client.client.transport.pinning import PinDriver, PinError
from trainer_client.errors import SessionEndedError, StoreUnavailableError

SIZE = 1 << 16
NONCE = b"nonce of 20 bytes..."
# The offsets of two slots, each with the generation in it.
FIRST, SECOND = (64, 7), (80, 8)
# The offset of the word that says how many bytes the store will not move any more; here it is all of them.
SETTLED = 48

# A program that prints for each byte whether another process has locked it.
WHICH_ARE_LOCKED = """
import fcntl, struct, sys
with open(sys.argv[1], "r+b") as file:
    for offset in sys.argv[2:]:
        flock = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, int(offset), 1, 0))
        print(int(struct.unpack("hhqqi0q", flock)[0] != fcntl.F_UNLCK), end="")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of an arena that no process has mapped yet."""
    return make_arena(tmp_path / "arena", NONCE)


def make_arena(path: Path, nonce: bytes) -> Path:
    content = bytearray(SIZE)
    content[: len(nonce)] = nonce
    for offset, generation in (FIRST, SECOND, (SETTLED, SIZE)):
        content[offset : offset + 8] = struct.pack("<Q", generation)
    path.write_bytes(content)
    return path


def description(path: Path, slot: tuple[int, int] = FIRST) -> pb.Arena:
    offset, generation = slot
    return pb.Arena(
        file_path=str(path),
        nonce=NONCE,
        size_bytes=SIZE,
        generation_offset=offset,
        generation=generation,
        settled_offset=SETTLED,
        piece_bytes=1 << 30,
    )


def map_arena(path: Path, slot: tuple[int, int] = FIRST) -> MappedArena:
    arena = MappedArena.map(description(path, slot))
    assert arena is not None
    return arena


def locked(path: Path) -> str:
    """Return a digit for each slot: 1 if this process has locked it, else 0."""
    command = [sys.executable, "-S", "-c", WHICH_ARE_LOCKED, str(path), str(FIRST[0]), str(SECOND[0])]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def open_descriptors(path: Path) -> int:
    status = path.stat()
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        # The listing has a descriptor of its own, which is closed before its link is read.
        with suppress(OSError):
            count += os.path.samestat(link.stat(), status)
    return count


def test_views_are_the_shared_memory_itself(path: Path) -> None:
    arena = map_arena(path)
    arena.view(4096, 8).view(torch.float32).copy_(torch.tensor([1.0, 2.0]))
    with path.open("rb") as file:
        assert os.pread(file.fileno(), 8, 4096) == torch.tensor([1.0, 2.0]).numpy().tobytes()


def test_the_descriptor_comes_over_the_socket_too(path: Path, tmp_path: Path) -> None:
    door = tmp_path / "door"
    descriptor = os.open(path, os.O_RDWR)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(door))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(connection, [b"\0"], [descriptor])

        thread = threading.Thread(target=serve)
        thread.start()
        wanted = description(path)
        wanted.file_path, wanted.socket_path = "", str(door)
        arena = MappedArena.map(wanted)
        thread.join()
    assert arena is not None and bytes(arena.view(0, len(NONCE)).numpy()) == NONCE
    del arena
    os.close(descriptor)


def test_another_nonce_is_another_nodes_arena(path: Path, tmp_path: Path) -> None:
    other = make_arena(tmp_path / "other", b"another node's nonce")
    assert MappedArena.map(description(other)) is None and open_descriptors(other) == 0
    arena = map_arena(path)
    # A session that looks at the wrong file does no harm to the session that has mapped this file.
    wrong = description(path, SECOND)
    wrong.nonce = b"another node's nonce"
    assert MappedArena.map(wrong) is None
    assert locked(path) == "10"
    arena.check()


def test_no_socket_and_no_file_is_another_node(tmp_path: Path) -> None:
    wanted = description(tmp_path / "none")
    wanted.socket_path = str(tmp_path / "no door")
    assert MappedArena.map(wanted) is None


def test_a_session_that_may_not_map_does_not(path: Path) -> None:
    assert MappedArena.map(description(path, (0, 0))) is None


def test_the_lock_lasts_until_the_last_view_is_gone(path: Path) -> None:
    arena = map_arena(path)
    view = arena.view(4096, 64)
    assert locked(path) == "10"
    arena.close()
    assert locked(path) == "10", "the view can be written to"
    part = view.view(torch.float32)[:2]
    del view
    part.fill_(1.0)
    assert locked(path) == "10"
    del part
    assert locked(path) == "00"
    assert str(path) not in Path("/proc/self/maps").read_text(), "the closed arena is kept, and its memory with it"
    with pytest.raises(StoreUnavailableError, match="closed"):
        arena.view(0, 1)
    with pytest.raises(StoreUnavailableError, match="closed"):
        arena.check()


def test_sessions_of_a_process_share_the_mapping_and_end_apart(path: Path) -> None:
    first, second = map_arena(path, FIRST), map_arena(path, SECOND)
    assert locked(path) == "11"
    shared = open_descriptors(path)
    first.close()
    # The kernel drops all of a process's locks on a file when the process closes any descriptor of the file.
    assert locked(path) == "01" and open_descriptors(path) == shared
    again = map_arena(path, FIRST)
    assert locked(path) == "11" and open_descriptors(path) == shared
    second.close()
    again.close()
    del first, second, again
    assert locked(path) == "00" and open_descriptors(path) == 0
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_changed_word_says_that_the_session_has_ended(path: Path) -> None:
    arena = map_arena(path)
    arena.check()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<Q", 9), FIRST[0])
    with pytest.raises(SessionEndedError, match="leases are void"):
        arena.check()


def test_the_mapping_of_a_daemon_that_is_gone_ends_with_its_last_lease(path: Path) -> None:
    """The arena itself stays referenced, as it does by the errors of the calls that its daemon did not answer."""
    arena = map_arena(path)
    lease = arena.view(4096, 64)
    arena.let_go()
    lease.fill_(1)
    arena.check()
    assert locked(path) == "10"
    del lease
    assert locked(path) == "00" and open_descriptors(path) == 0
    assert str(path) not in Path("/proc/self/maps").read_text()
    arena.check()
    with pytest.raises(StoreUnavailableError, match="closed"):
        arena.view(0, 1)


def test_the_end_of_a_session_is_known_after_its_daemon_is_gone(path: Path) -> None:
    arena = map_arena(path)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<Q", 9), FIRST[0])
    arena.let_go()
    with pytest.raises(SessionEndedError, match="leases are void"):
        arena.check()


def test_a_process_that_slept_before_it_mapped_finds_its_session_ended(path: Path) -> None:
    with pytest.raises(SessionEndedError):
        MappedArena.map(description(path, (FIRST[0], 6)))
    assert locked(path) == "00" and open_descriptors(path) == 0


class RecordingDriver:
    """A driver that registers nothing, and records its calls with the locks that this process holds at each of them.

    `synchronize` waits until `done` is set, as a device that has copies to do.
    """

    def __init__(self, path: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self.done = threading.Event()
        self.done.set()
        self.failure: PinError | None = None
        self.driver = PinDriver(register=self._register, unregister=self._unregister, synchronize=self._synchronize)
        self._path = path

    def map(self, slot: tuple[int, int] = FIRST, **changes: Any) -> MappedArena:
        wanted = description(self._path, slot)
        for field, value in changes.items():
            setattr(wanted, field, value)
        arena = MappedArena.map(wanted, self.driver, is_announced=True)
        assert arena is not None
        if arena.pins is not None:
            arena.pins.wait()
        return arena

    def _note(self, call: str) -> None:
        self.calls.append((call, locked(self._path)))

    def _register(self, address: int, nbytes: int) -> None:
        assert address % (2 << 20) == 0 and nbytes == SIZE
        self._note("register")

    def _unregister(self, address: int) -> None:
        self._note("unregister")

    def _synchronize(self) -> None:
        self.done.wait(20)
        self._note("synchronize")
        if self.failure is not None:
            raise self.failure


def left(path: Path, slot: tuple[int, int]) -> bool:
    """Return whether the second word of a slot says that its client has waited for its device."""
    # Another process reads the file, because this one would lose its locks when it closes a descriptor of it.
    content = subprocess.run(["cat", path], check=True, capture_output=True).stdout
    return content[slot[0] + 8 : slot[0] + 16] == struct.pack("<Q", slot[1])


def test_a_registered_arena_is_left_after_its_copies_and_its_registration(path: Path) -> None:
    device = RecordingDriver(path)
    arena = device.map()
    assert arena.pins is not None and arena.pins.is_pinned(0, SIZE) and not left(path, FIRST)
    arena.close()
    assert device.calls == [("register", "10"), ("synchronize", "10"), ("unregister", "10")]
    assert locked(path) == "00" and left(path, FIRST)
    assert open_descriptors(path) == 0 and str(path) not in Path("/proc/self/maps").read_text()


def test_sessions_of_a_process_share_the_registration(path: Path) -> None:
    device = RecordingDriver(path)
    first, second = device.map(FIRST), device.map(SECOND)
    assert first.pins is second.pins
    first.close()
    assert locked(path) == "01" and left(path, FIRST) and not left(path, SECOND)
    again = device.map(FIRST)
    second.close()
    again.close()
    assert [call for call, _ in device.calls] == ["register", *["synchronize"] * 3, "unregister"]
    assert device.calls[-1] == ("unregister", "10"), "the last session's lock is held until the registration has ended"
    # The next session maps and registers anew.
    device.calls.clear()
    device.map().close()
    assert [call for call, _ in device.calls] == ["register", "synchronize", "unregister"]


def test_a_view_that_is_gone_says_nothing_about_copies_that_the_device_has_not_done(path: Path) -> None:
    device = RecordingDriver(path)
    device.done.clear()
    arena = device.map()
    view = arena.view(4096, 64)
    arena.close()
    del view
    assert locked(path) == "10" and not left(path, FIRST)
    device.done.set()
    assert arena._leaving.over.wait(20)
    assert locked(path) == "00" and left(path, FIRST)


def test_a_device_that_hangs_does_not_hang_the_end_of_a_session_and_the_lock_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_module, "_LEAVE_SECONDS", 0.1)
    device = RecordingDriver(path)
    device.done.clear()
    arena = device.map()
    arena.close()
    assert "has not finished its copies" in caplog.messages[-1] and locked(path) == "10"
    device.done.set()
    assert arena._leaving.over.wait(20) and locked(path) == "00"


def test_a_device_that_cannot_be_waited_for_leaves_the_lock_to_the_end_of_the_process(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = RecordingDriver(path)
    device.failure = PinError("cuCtxSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    arena = device.map()
    arena.close()
    assert "locked until this process ends" in caplog.messages[-1] and "ILLEGAL_ADDRESS" in caplog.messages[-1]
    assert locked(path) == "10" and not left(path, FIRST)
    # The end of the process would release it. Here another attempt does, for the tests that follow.
    device.failure = None
    (mapping,) = arena_module._mappings.values()
    assert mapping.pins is not None
    arena._leaving._leave(mapping.pins)
    assert locked(path) == "00"


def test_nothing_is_registered_beside_a_session_that_has_not_announced_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, device = map_arena(path, FIRST), RecordingDriver(path)
    arena = device.map(SECOND)
    assert arena.pins is None and not device.calls
    assert "a session of this process began before" in caplog.messages[-1]
    before.close()
    del before
    arena.close()
    arena = device.map(SECOND)
    assert arena.pins is not None
    # A session that began before the announcement, and maps only now, copies through streams.
    assert MappedArena.map(description(path, FIRST)) is None and locked(path) == "01"
    arena.close()


def test_nothing_is_registered_where_the_store_does_not_expect_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = RecordingDriver(path)
    arena = device.map(settled_offset=0)
    assert arena.pins is None and "the daemon is older" in caplog.messages[-1]
    arena.close()
    assert not device.calls and left(path, FIRST) and locked(path) == "00"


def test_a_mapping_whose_last_view_goes_during_a_search_is_no_error(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run during the search and end an earlier mapping; test_outliving.py has shown it."""
    former, compare = map_arena(path), arena_module._is_it
    nonce = bytes(reversed(NONCE))
    wanted = description(make_arena(tmp_path / "next arena", nonce))
    wanted.nonce = nonce

    def close_and_compare(mapping: Any, wanted: pb.Arena) -> bool:
        former.close()
        return compare(mapping, wanted)

    monkeypatch.setattr(arena_module, "_is_it", close_and_compare)
    arena = MappedArena.map(wanted)
    assert arena is not None
    arena.close()
