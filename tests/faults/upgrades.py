"""Trains with trainers and daemons of this commit and of an earlier one, mixed, and compares the bits.

`python -m tests.faults.upgrades COMMIT`. The earlier commit is checked out beside this one. Each round runs
examples/train_gpt2.py of one commit on two ranks, against a daemon of one commit:

- `now`: both are of this commit. The other rounds must have its losses and weights, bit for bit;
- `old trainer`, `old daemon`: one of the two is of the earlier commit;
- `upgrade`: both are of the earlier commit; after some steps an operator stops the daemon, and starts one of this
  commit with the same state directory, under the job that trains.

Prints a report in JSON; the exit status is 1 if a round ended with an error or has other bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.checkout import checked_out
from benchmarks.common.machine import ROOT
from tests.integration.support.daemon import Daemon
from tests.integration.support.waiting import wait_until

RANKS = 2
STEPS = 12
UPGRADED_AT = 5
BUDGETS = {"host_budget": "256MiB", "nvme_budget": "2GiB"}
END_SECONDS = 900.0


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process that runs the code of a checkout; the path of it is searched first."""
    return os.environ | {"PYTHONPATH": str(tree)}


def start_daemon(tree: Path, directory: Path) -> Daemon:
    """Start a daemon of a checkout over the state directory of a round."""
    # With -P Python does not search the working directory, which is this checkout.
    program = ("-P", "-m", "paramserver")
    return Daemon(directory / "state", BUDGETS, fresh=True, program=program, environment=environment(tree))


def start_trainers(tree: Path, directory: Path, address: str) -> subprocess.Popen[bytes]:
    """Start the example of a checkout on RANKS ranks; the log and the journal are in the directory of the round."""
    script = (str(tree / "examples/train_gpt2.py"), "--steps", str(STEPS), "--journal", str(directory / "journal"))
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    with (directory / "trainers.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, *script, "--digest-every", str(STEPS)],
            cwd=directory,
            env=environment(tree) | {"PARAMSERVER_ADDRESS": address},
            stdout=log,
            stderr=log,
        )


def journal_of(directory: Path) -> dict[str, str]:
    """Return the exact losses of all ranks by rank and step, and the digest of the weights at the end."""
    found = {}
    for path in sorted((directory / "journal").glob("rank-*.jsonl")):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] == "loss":
                found[f"{path.stem}, loss of step {event['step']}"] = event["exact"]
            elif event["event"] == "weights" and event["step"] == STEPS:
                found["weights"] = event["sha256"]
    return found


def play(directory: Path, of_daemon: Path, of_trainers: Path, upgraded_to: Path | None = None) -> dict[str, str]:
    """Run one round, and return what `journal_of` finds.

    Raises:
        AssertionError: the trainers ended with an error, or not at all. The message has the ends of the logs.
    """
    directory.mkdir()
    daemon = start_daemon(of_daemon, directory)
    trainers = start_trainers(of_trainers, directory, daemon.address)
    try:
        if upgraded_to is not None:
            reached = f"rank-0, loss of step {UPGRADED_AT}"
            wait_until(lambda: reached in journal_of(directory) or trainers.poll() is not None, seconds=END_SECONDS)
            daemon.stop()
            daemon = start_daemon(upgraded_to, directory)
        ended = str(trainers.wait(END_SECONDS))
    except (subprocess.TimeoutExpired, AssertionError) as error:
        ended = f"not within {END_SECONDS:g} s: {error}"
    finally:
        trainers.kill()
        trainers.wait()
        log = daemon.log
        daemon.kill()
    text = (directory / "trainers.log").read_text()
    assert ended == "0", f"the trainers ended with {ended}:\n{text[-3000:]}\nthe daemon said:\n{log[-2000:]}"
    found = journal_of(directory)
    assert len(found) == RANKS * STEPS + 1, f"a loss or the weights are missing: {sorted(found)}"
    return found


def main() -> None:
    """Run the rounds, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.upgrades", description=__doc__)
    parser.add_argument("commit", help="the earlier commit")
    commit = parser.parse_args().commit
    rounds: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="upgrades-") as temporary, checked_out(commit) as old:
        expected = play(Path(temporary) / "now", ROOT, ROOT)
        for name, of_daemon, of_trainers, upgraded_to in (
            ("old trainer", ROOT, old, None),
            ("old daemon", old, ROOT, None),
            ("upgrade", old, old, ROOT),
        ):
            began = time.monotonic()
            try:
                found = play(Path(temporary) / name, of_daemon, of_trainers, upgraded_to)
                rounds[name] = {"differences": sorted(key for key in expected if found.get(key) != expected[key])}
            except AssertionError as error:
                rounds[name] = {"error": str(error)}
            rounds[name]["seconds"] = round(time.monotonic() - began, 1)
    failed = [name for name, played in rounds.items() if "error" in played or played["differences"]]
    print(json.dumps({"commit": commit, "failed_rounds": failed, "rounds": rounds}, indent=2))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
