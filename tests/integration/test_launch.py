"""`paramserver launch` runs ranks with a daemon, returns their status, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.support.daemon import Daemon

ROOT = Path(__file__).parents[2]
# A rank notes where it was started and whether the store's socket is there, and then does what its argument says. It
# imports nothing, because torch takes seconds and is not under test.
RANK = """
import json, os, sys, time
rank, socket = os.environ["RANK"], os.environ["PARAMSERVER_ADDRESS"].removeprefix("unix:")
names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PARAMSERVER_ADDRESS", "OMP_NUM_THREADS")
with open(f"{sys.argv[1]}/{rank}.part", "w") as file:
    json.dump({name: os.environ[name] for name in names} | {"socket": os.path.exists(socket)}, file)
os.rename(f"{sys.argv[1]}/{rank}.part", f"{sys.argv[1]}/{rank}.json")
if sys.argv[2] == "sleep":
    time.sleep(600)
if rank == "1":
    # torchrun ends rank 0 as soon as this rank fails.
    while not os.path.exists(f"{sys.argv[1]}/0.json"):
        time.sleep(0.01)
    sys.exit(int(sys.argv[2]))
"""


def start(tmp_path: Path, *arguments: str, end: str) -> subprocess.Popen[str]:
    (tmp_path / "rank.py").write_text(RANK)
    program = [str(tmp_path / "rank.py"), str(tmp_path), end]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "PARAMSERVER_ADDRESS", "OMP_NUM_THREADS")}
    return subprocess.Popen(
        [sys.executable, "-m", "paramserver", "launch", "--nproc-per-node", "2", *arguments, *program],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def facts(tmp_path: Path, rank: int) -> dict[str, object]:
    read: dict[str, object] = json.loads((tmp_path / f"{rank}.json").read_text())
    return read


def pid_of_daemon(state_dir: Path) -> int:
    return int((state_dir / "lock").read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(300)
def test_a_launch_starts_a_daemon_returns_the_ranks_status_and_stops_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    launched = start(tmp_path, "--state-dir", str(state), "--host-budget", "64MiB", "--nvme-budget", "256MiB", end="7")

    _, errors = launched.communicate(timeout=240)

    assert launched.returncode == 7, errors
    assert "rank 1" in errors and "exit code 7" in errors
    expected = {"WORLD_SIZE": "2", "PARAMSERVER_ADDRESS": f"unix:{state}/paramserver.sock", "socket": True}
    for rank in range(2):
        assert facts(tmp_path, rank).items() >= (expected | {"LOCAL_RANK": str(rank)}).items()
    assert not is_alive(pid_of_daemon(state))
    assert not (state / "paramserver.sock").exists()


@pytest.mark.timeout(300)
def test_a_signal_ends_the_ranks_and_a_daemon_that_was_there_before_stays(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        launched = start(tmp_path, "--state-dir", str(tmp_path / "state"), end="sleep")
        deadline = time.monotonic() + 240
        while not all((tmp_path / f"{rank}.json").exists() for rank in range(2)):
            assert launched.poll() is None and time.monotonic() < deadline, launched.communicate()[1]
            time.sleep(0.1)
        launched.send_signal(signal.SIGTERM)
        _, errors = launched.communicate(timeout=120)

        assert launched.returncode == 128 + signal.SIGTERM, errors
        assert "using the store daemon that serves at" in errors
        assert "ended by SIGTERM" in errors
        assert is_alive(daemon.process.pid)
