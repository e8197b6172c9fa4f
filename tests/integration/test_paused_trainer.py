"""Trainers that stand still for longer than their sessions last, and go on.

Each rank stops itself with SIGSTOP at moments of the plan. It is woken when the daemon has ended its session.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import Forked
from tests.integration.support.outliving import MODULE, differences, make_plan, start_daemon
from tests.integration.support.ranks import END_SECONDS, Launch

STEPS = 6
DAEMON = {"heartbeat_timeout_seconds": 2.0}
_NVME, _HOST = {"device": "nvme"}, {"device": "cpu"}
STAGE_3 = {"stage": 3, "offload_param": _NVME, "offload_optimizer": _NVME}
STAGE_2 = {"stage": 2, "offload_optimizer": _HOST}
# The votes of both ranks are behind these moments, and no parameter is read in place in them.
AT_REST = [(2, "before vote"), (3, "after backward 0"), (5, "after step")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: its ranks, config and moments, and what its ranks say last if they do not go on."""

    ranks: int
    zero: Mapping[str, Any]
    stops: list[tuple[int, str]]
    section: Mapping[str, Any]
    last_words: str = ""


CASES = {
    "one-rank": Case(ranks=1, zero=STAGE_2, stops=AT_REST, section={}),
    "two-ranks": Case(ranks=2, zero=STAGE_3, stops=AT_REST, section={}),
    "gradients-not-kept": Case(
        ranks=1,
        zero=STAGE_2,
        stops=[(3, "before vote")],
        section={"kept_gradients": 64},
        last_words="SessionEndedError: this process was silent, or its connection broken, for longer than the store "
        "daemon at unix:",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of a run."""

    codes: list[int | None]
    output: str
    log: str
    results: list[dict[str, Any]]


def is_stopped(rank: Forked) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        status = Path(f"/proc/{rank.pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def wake(daemon: Daemon, launch: Launch, wakes: int) -> int:
    """Wake the ranks if all are stopped and the daemon has ended their sessions; return how often that was done."""
    ended = daemon.log.count("ended (no heartbeat")
    if ended < (wakes + 1) * len(launch.ranks) or not all(map(is_stopped, launch.ranks)):
        return wakes
    for rank in launch.ranks:
        rank.send_signal(signal.SIGCONT)
    return wakes + 1


def play(directory: Path, case: Case, *, quietly: bool = False) -> Played:
    """Run a case to its end, with or without its stops."""
    config = {"zero_optimization": case.zero, "paramserver": dict(case.section)}
    plan = make_plan(
        directory, config, steps=STEPS, only_trains=True, daemon=DAEMON, stops=[] if quietly else case.stops
    )
    plans = directory / "plans.json"
    plans.write_text(json.dumps([asdict(plan)]))
    daemon, wakes, deadline = start_daemon(plan), 0, time.monotonic() + END_SECONDS
    try:
        with Launch(MODULE, case.ranks, (plans,), directory) as launch:
            while any(rank.poll() is None for rank in launch.ranks):
                assert time.monotonic() < deadline, f"{launch.stacks()}\n{daemon.log}"
                wakes = wake(daemon, launch, wakes)
                time.sleep(0.01)
            codes = [rank.poll() for rank in launch.ranks]
            output = launch.output()
    finally:
        daemon.kill()
    files = [plan.results_file(rank) for rank in range(case.ranks)]
    return Played(
        codes=codes, output=output, log=daemon.log, results=[torch.load(file) for file in files if file.exists()]
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    """What became of the cases, and of those that go on without stops ("quiet-..."), all at the same time."""
    runs = {name: partial(play, tmp_path_factory.mktemp(name), case) for name, case in CASES.items()}
    for name, case in CASES.items():
        if not case.last_words:
            runs[f"quiet-{name}"] = partial(play, tmp_path_factory.mktemp(f"quiet-{name}"), case, quietly=True)
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = {name: pool.submit(run) for name, run in runs.items()}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.last_words])
def test_a_trainer_that_stood_still_goes_on_in_another_session(played: dict[str, Played], name: str) -> None:
    found, case = played[name], CASES[name]

    assert found.codes == [0] * case.ranks, f"{found.output}\n{found.log}"
    assert differences(found.results, played[f"quiet-{name}"].results) == []
    assert all(len(result["restarts"]) == len(case.stops) for result in found.results)
    assert "has ended this session; beginning another one" in found.output


def test_a_trainer_whose_gradients_are_gone_ends_with_one_line(played: dict[str, Played]) -> None:
    found = played["gradients-not-kept"]

    assert found.codes == [1]
    lines = [line for line in found.output.splitlines() if line.startswith("trainer_client.errors.")]
    assert len(lines) == 1, found.output
    last = lines[0]
    assert CASES["gradients-not-kept"].last_words in last, found.output
    assert "larger than paramserver.kept_gradients: raise that to go on here" in last
    assert "restart the job, it resumes from the last commit" in last
