"""The set-up of every test: the daemon's kind of event loop, and a report of the tests that blocked it."""

from __future__ import annotations

import gc
import os
import signal
from asyncio import Future
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist
import uvloop

from paramserver.process.loop_watch import LoopWatch

T = TypeVar("T")

# A loop that is blocked for longer is reported at the end of the run, for people to judge. It is no failure, because
# tests compute their references on the loop, and because the host may withhold CPU, disk and memory from a virtual
# machine: on a busy host, starting a thread took 0.9 s, and making a tensor of random numbers 1.9 s.
REPORTED_SECONDS = 0.5
# A loop that is blocked for longer hangs, so its test fails.
FAILED_SECONDS = 20.0

# The groups of tests that take minutes and run only when they are asked for: the name of the marker, and the target.
GROUPS = {
    "peers": "make peers",
    "bench": "make bench-check",
    "runbooks": "make runbooks",
    "prometheus": "make prometheus-check",
    "campaigns": "make campaigns",
}

# The key of the user property under which a blocked loop is attached to a test's report.
BLOCKED = "blocked"
# Reports of blocked loops in the running phase of a test (set-up, call or tear-down).
_reports: list[str] = []


@pytest.fixture(autouse=True)
def _leaves_the_process_group() -> Iterator[None]:
    """End the process group that a test has made, as `zero.Init` does, so that the next test has none before it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class WatchedLoop(uvloop.Loop):
    """A uvloop that reports what blocked it, and fails a test or fixture that blocked it for `failed_seconds`.

    If the test itself raised, that exception is raised instead.
    """

    def __init__(self, reports: list[str] = _reports, failed_seconds: float = FAILED_SECONDS) -> None:
        super().__init__()
        self.watch: LoopWatch | None = None  # The watch of the last `run_until_complete`.
        self._reports, self._failed_seconds = reports, failed_seconds

    def run_until_complete(self, future: Generator[object, None, T] | Awaitable[T] | Future[T]) -> T:
        """Run `future` under a watch; raise pytest's failure if a callback blocked the loop for too long."""
        stacks: list[str] = []

        def note(stack: str) -> None:
            # If the loop waits in its own poll, no call blocks it; the machine did not give it the CPU.
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
    """Attach the reports to the test's report, because the test may run in another process than the one that prints."""
    item.user_properties.extend((BLOCKED, report) for report in _reports)
    _reports.clear()
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which tests blocked their event loop."""
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


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C end the programs that tests start, also where the suite itself was started to ignore it.

    A shell starts a command in the background, and `nohup` one, with SIGINT ignored, which all its children inherit.

    Unless only the tests for GPUs run (`-m gpu`), GPUs are hidden from this process and from those that it starts. The
    other tests compare with references on the CPU, and start more ranks than most machines have GPUs.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this suite's options."""
    parser.addoption(
        "--whole-matrix",
        action="store_true",
        help="tests/integration/test_matrix.py: each training at each place and world size, not a part of them",
    )
    parser.addoption(
        "--deepspeed",
        type=Path,
        default=Path(__file__).parents[1] / "build/deepspeed",
        help="the environment with DeepSpeed, which `make peers` sets up; tests that need it are skipped without it",
    )
    for name in ("accelerate", "DeepSpeedExamples"):
        parser.addoption(
            f"--{name.lower()}",
            type=Path,
            default=Path(__file__).parents[1] / "build" / name,
            help=f"a checkout of {name}, whose examples tests/peers runs; they are skipped without it",
        )
    parser.addoption(
        "--busy-seconds",
        type=float,
        help="tests/integration/test_silent_nodes.py: so long ranks on busy cores and a slow link watch each other, "
        "with the product's own time after which a rank counts as silent; by default 12 s, with a shorter one",
    )
    parser.addoption(
        "--many-ranks",
        type=int,
        default=16,
        help="tests/integration/test_many_ranks.py: the number of ranks whose sockets are counted, a power of two",
    )
    parser.addoption(
        "--with", action="append", default=[], choices=list(GROUPS), help="also run the tests of this group; repeatable"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without garbage collections, and exempt what was imported from later ones.

    The collections took 4 of 12 s of CPU time during the collection of all tests, and 0.6 s each after it (measured).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of groups that have a target of their own, unless they are asked for."""
    for group, target in GROUPS.items():
        if group not in config.getoption("--with"):
            skip = pytest.mark.skip(reason=f"is run by `{target}`")
            for item in items:
                if item.get_closest_marker(group):
                    item.add_marker(skip)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], uvloop.Loop]]:
    """Run async tests on uvloop, as the daemon does."""
    return {"uvloop": WatchedLoop}
