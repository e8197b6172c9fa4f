"""The script for Slurm starts a daemon and ranks, and stops first these and then the daemon at a signal.

Slurm itself is not needed: two small programs of this test stand in for `srun` and `scontrol` on one node.
docs/deploy.md says what was run with Slurm.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.integration.support.forked import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "paramserver.sbatch"
SECONDS = 240.0
ADMIN = "from paramserver.__main__ import admin; admin()"
# srun runs the words after its options as one task, and passes the signals that it gets on to it.
PROGRAMS = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n',
    "scontrol": "#!/bin/bash\n[[ $* == 'show hostnames node[1]' ]] && echo 127.0.0.1\n",
    "paramserver": f"#!/bin/bash\nexec '{sys.executable}' -m paramserver \"$@\"\n",
    "paramserver-admin": f"#!/bin/bash\nexec '{sys.executable}' -c '{ADMIN}' \"$@\"\n",
}
# A rank that imports nothing, because what it computes is not under test.
RANK = """
import os, sys, time
socket = os.environ["PARAMSERVER_ADDRESS"].removeprefix("unix:")
open(sys.argv[1], "w").write(f"{os.environ['WORLD_SIZE']} {os.path.exists(socket)}")
time.sleep(600)
"""


@contextmanager
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the script with ranks that wait, and kill at the end what is left of it."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, text in PROGRAMS.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK)
    job = {"SLURM_JOB_NODELIST": "node[1]", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": str(os.getpid())}
    own = {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "STATE_DIR": str(tmp_path / "state"),
        "HOST_BUDGET": "32MiB",
        "NVME_BUDGET": "64MiB",
        "RANKS_PER_NODE": "2",
    }
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(("PARAMSERVER_", "RANK"))}
    arguments = [str(tmp_path / "rank.py"), str(tmp_path / "fact")]
    with subprocess.Popen(
        ["bash", SCRIPT, *arguments],
        cwd=tmp_path,
        env=surroundings | job | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as script:
        try:
            yield script
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)


def daemon_is_gone(state: Path) -> bool:
    pid = int((state / "lock").read_text())
    return not Path(f"/proc/{pid}").exists() and not (state / "paramserver.sock").exists()


@pytest.mark.timeout(300)
def test_the_signal_before_the_time_limit_stops_the_ranks_and_then_the_daemon(tmp_path: Path) -> None:
    with started(tmp_path) as job:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "fact").exists():
            assert job.poll() is None and time.monotonic() < deadline, "the ranks have not started"
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=120)

    assert job.returncode == 128 + signal.SIGTERM, output
    assert (tmp_path / "fact").read_text() == "2 True"
    assert output.index("ended by SIGTERM") < output.index('"stopped"')
    assert daemon_is_gone(tmp_path / "state")


def test_the_options_of_slurm_come_before_the_first_command_and_ask_for_a_signal_in_time() -> None:
    text = SCRIPT.read_text()
    options = re.findall(r"^#SBATCH (--\S+)$", text.split("\nset -euo pipefail\n")[0], flags=re.MULTILINE)

    assert len(options) == text.count("#SBATCH")
    # SIGTERM goes to the script alone, which then has time for what follows.
    assert "--signal=B:TERM@120" in options
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    assert os.access(SCRIPT, os.X_OK)
