"""The part of the yardstick in pytest: a daemon, and one line of JSON for each result.

This module owns the choice of tests and the daemon of a session. It must never make a failing test pass.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deepspeed_suite import RESULTS_VARIABLE, SAMPLE_VARIABLE, launcher  # noqa: F401
from tests.integration.support.daemon import Daemon

# The number of tests that each chosen test stands for, by its name.
_weights: dict[str, float] = {}


@pytest.fixture(scope="session", autouse=True)
def _daemon() -> Iterator[None]:
    """Start the daemon that all jobs of the session are stored in."""
    budgets = {"host_budget": "1GiB", "nvme_budget": "16GiB"}
    with (
        tempfile.TemporaryDirectory(prefix="deepspeed-suite-") as directory,
        Daemon(Path(directory) / "state", budgets, fresh=True) as daemon,
    ):
        os.environ["PARAMSERVER_ADDRESS"] = daemon.address
        # The server that forks ranks starts with the first test.
        multiprocessing.set_forkserver_preload(["tests.deepspeed_suite.launcher"])
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the tests, of those that DeepSpeed's markers leave."""
    items[:] = _sample(items, int(os.environ.get(SAMPLE_VARIABLE, "0")))


def _sample(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return at most so many parameter sets of each test function, drawn with a fixed seed; with 0, all of them.

    Each result tells how many tests of the function it stands for.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, tests in functions.items():
        drawn = random.Random(name).sample(tests, min(most or len(tests), len(tests)))
        _weights.update({item.nodeid: len(tests) / len(drawn) for item in drawn})
    return [item for item in items if item.nodeid in _weights]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line of JSON for the result of a test."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, _reason(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write one line of JSON for a file that cannot be collected."""
    if report.outcome == "failed":
        _write(report.nodeid, "failed", f"collection: {_last_line(str(report.longrepr))}")


def _write(name: str, outcome: str, reason: str) -> None:
    with Path(os.environ[RESULTS_VARIABLE]).open("a") as results:
        result = {"test": name, "outcome": outcome, "weight": _weights.get(name, 1.0), "reason": reason}
        results.write(json.dumps(result) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).strip()[:600] if crash is not None else _last_line(str(report.longrepr))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:600] if lines else ""
