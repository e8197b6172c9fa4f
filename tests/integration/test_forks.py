"""A process that trains may fork: a loader's workers print nothing, and a child that uses the engine gets an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import ROOT

# A child that hangs makes the script hang.
MOST_SECONDS = 300


def test_a_child_has_clear_errors_and_a_client_of_its_own_and_the_run_goes_on(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.integration.support.forking_trainer", daemon.address],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    for name in ("forward", "weights", "client"):
        assert told[name].startswith("ForkedChildError: this process is a forked child of process "), told
    assert "connect a StoreClient of its own" in told["client"]
    assert told["step"] != ""
    assert {name: told[name] for name in ("another client", "close", "close of the client", "exit")} == {
        "another client": "",
        "close": "",
        "close of the client": "",
        "exit": "0",
    }
    assert told["steps"] == 9
    # gRPC writes its check failure and a stack trace for each child that it aborts.
    lines = [line for line in ended.stderr.splitlines() if "g_active_poller" not in line and "stack trace" not in line]
    assert lines == [f"paramserver: new job 'default', in the store at {daemon.address}"]
