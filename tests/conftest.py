"""What every test gets: the daemon's kind of event loop, and a report when something blocks that loop."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import TypeVar

import pytest
import uvloop

from paramserver.process.loop_watch import LoopWatch

T = TypeVar("T")

# A loop that is held for longer is reported at the end of the run: who looks at it decides. The tests compute their
# references on it, and a virtual machine may be kept from its processors, disk and memory without seeing by whom: on a
# busy host, starting a thread took 0.9 s, and a tensor of random numbers 1.9 s.
REPORTED_SECONDS = 0.5
# A loop that is held for so long hangs, as does a test that takes longer than pytest's timeout.
FAILED_SECONDS = 20.0

BLOCKED = "blocked"  # of what a test's report says
_reports: list[str] = []  # of the phase of a test that runs


class WatchedLoop(uvloop.Loop):
    """A uvloop that reports what blocked it, and fails the test or fixture that blocked it for very long; what the test
    itself raised goes first."""

    def __init__(self, reports: list[str] = _reports, failed_seconds: float = FAILED_SECONDS) -> None:
        super().__init__()
        self.watch: LoopWatch | None = None  # the one of the last run
        self._reports, self._failed_seconds = reports, failed_seconds

    def run_until_complete(self, future: Generator[object, None, T] | Awaitable[T] | Future[T]) -> T:
        """Runs `future` under a watchdog; raises pytest's failure when a callback held the loop for too long."""
        stacks: list[str] = []

        def note(stack: str) -> None:
            # A loop that waits in its own poll was kept from the processor, and by nobody's call.
            if not stack.splitlines()[-2].endswith("in run_until_complete"):
                stacks.append(stack)

        self.watch = LoopWatch(self, note, stall_seconds=REPORTED_SECONDS)
        with self.watch as watch:
            result = super().run_until_complete(future)
        if stacks:
            report = (
                f"the event loop was blocked for {watch.longest_stall_seconds:.2f} s (move the call to a thread: "
                f"asyncio.to_thread); it was here:\n{stacks[0]}"
            )
            if watch.longest_stall_seconds >= self._failed_seconds:
                pytest.fail(report, pytrace=False)
            self._reports.append(report)
        return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Passes the reports on with those of the test, which may run in another process than the one that prints."""
    item.user_properties.extend((BLOCKED, report) for report in _reports)
    _reports.clear()
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which tests held their event loop."""
    ended = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
    ]
    blocked = [(test.nodeid, text) for test in ended for name, text in test.user_properties if name == BLOCKED]
    if blocked:
        terminalreporter.section("event loops that were blocked")
    for test, text in blocked:
        terminalreporter.write_line(f"{test}: {text}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    parser.addoption(
        "--whole-matrix",
        action="store_true",
        help="tests/integration/test_matrix.py: each training at each place and world size, not a part of them",
    )


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], uvloop.Loop]]:
    """Async tests run on what the daemon runs on."""
    return {"uvloop": WatchedLoop}
