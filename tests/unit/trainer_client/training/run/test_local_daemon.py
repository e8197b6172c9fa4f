"""What a rank does for its daemon before there is one."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

import pytest

from trainer_client.errors import LocalDaemonError
from trainer_client.training.run import local_daemon


@pytest.fixture
def held(tmp_path: Path) -> Iterator[IO[bytes]]:
    """The lock of a state directory, `tmp_path`, which a daemon has that does not serve."""
    with (tmp_path / local_daemon.LOCK_NAME).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(b"4711\n")
        lock.flush()
        yield lock


def test_a_daemon_that_is_still_ending_is_waited_for(
    tmp_path: Path, held: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon of a killed trainer may finish a snapshot for longer than the trainer takes to be started again."""
    monkeypatch.setattr(local_daemon, "_PREDECESSOR_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(local_daemon._wait_for_predecessor, tmp_path, f"unix:{tmp_path}/paramserver.sock")
        # Without the wait for its end, the error comes within this time.
        wait([waiting], timeout=0.3)
        fcntl.flock(held, fcntl.LOCK_UN)
        waiting.result(30)


def test_a_daemon_that_neither_serves_nor_ends_is_named(
    tmp_path: Path, held: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_daemon, "_ENDING_SECONDS", 0.0)
    with pytest.raises(LocalDaemonError, match=rf"pid 4711\) has {tmp_path} locked, and has not served at unix:"):
        local_daemon._wait_for_predecessor(tmp_path, f"unix:{tmp_path}/paramserver.sock")
