"""A rank's follower is started again whatever has ended it, so a replica does not end with one of its processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from trainer_client.errors import CollectiveError, StoreUnavailableError
from trainer_client.training.run import replicas
from trainer_client.training.run.replicas import FollowerProcess

# It stands for a follower that is killed while it tells of a step, by a shortage that goes on for a while: its Python
# cannot be started again until the test brings it back. The order is the path of this Python.
PROGRAM = """
import pathlib, sys
python = pathlib.Path(sys.stdin.readline().strip())
was_here = python.with_name("was here")
if not was_here.exists():
    was_here.touch()
    python.unlink()
    sys.stdout.write('{"step": 1, "prob')
    sys.exit(9)
print('{"step": 2, "problem": ""}', flush=True)
sys.stdin.read()
"""


def test_a_follower_that_ended_in_the_middle_of_a_line_is_started_as_soon_as_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, python = tmp_path / "follow.py", tmp_path / "python"
    program.write_text(PROGRAM)
    python.symlink_to(sys.executable)
    real = python.readlink()
    monkeypatch.setattr(replicas, "_PROGRAM", program)
    monkeypatch.setattr(replicas, "_RESTART_SECONDS", 0.01)
    monkeypatch.setattr(sys, "executable", str(python))
    follower = FollowerProcess(str(python), "b:1")
    try:
        deadline = time.monotonic() + 30
        while "the follower cannot be started: " not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)
        assert "the follower ended with 9" in caplog.text
        python.symlink_to(real)
        follower.wait(2, 30, lambda: None)
    finally:
        follower.stop()


def test_a_wait_for_a_replica_ends_when_the_run_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "follow.py"
    program.write_text("import sys; sys.stdin.read()")
    monkeypatch.setattr(replicas, "_PROGRAM", program)
    follower = FollowerProcess("", "b:1")

    def check() -> None:
        raise CollectiveError("another rank has gone")

    try:
        with pytest.raises(CollectiveError, match="another rank"):
            follower.wait(1, 600, check)
        with pytest.raises(StoreUnavailableError, match="step 1 is committed, but after 0 s the daemon at b:1 does"):
            follower.wait(1, 0, lambda: None)
        follower.stop_waiting()
        follower.wait(1, 600, check)
    finally:
        follower.stop()
