"""What runs over this library: the options that point at other projects' scripts, and the table at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

_FOLDER = "tests/peers/"
# A case starts a script up to three times, and each start imports these libraries.
_LIMIT_SECONDS = 3000


def _checkout(request: pytest.FixtureRequest, option: str, address: str, variable: str) -> Path:
    """Return the directory of another project's checkout; skip the test where there is none."""
    directory: Path = request.config.getoption(option)
    if not directory.is_dir():
        pytest.skip(f"no checkout in {directory}: `git clone --depth 1 {address} {directory}`, or {variable}=DIRECTORY")
    return directory.resolve()


@pytest.fixture(scope="session")
def accelerate_checkout(request: pytest.FixtureRequest) -> Path:
    """The directory of a checkout of Accelerate."""
    return _checkout(request, "--accelerate", "https://github.com/huggingface/accelerate", "make peers ACCELERATE")


@pytest.fixture(scope="session")
def deepspeed_examples(request: pytest.FixtureRequest) -> Path:
    """The directory of a checkout of DeepSpeed's examples."""
    address = "https://github.com/deepspeedai/DeepSpeedExamples"
    return _checkout(request, "--deepspeedexamples", address, "make peers DEEPSPEED_EXAMPLES")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the cases of this folder more time than other tests have."""
    for item in items:
        if item.nodeid.startswith(_FOLDER):
            item.add_marker(pytest.mark.timeout(_LIMIT_SECONDS))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print a table of the cases of this folder: the library, the case, what came out, and the seconds."""
    rows: dict[str, tuple[str, float]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.nodeid.startswith(_FOLDER):
                rows[report.nodeid] = (outcome, getattr(report, "duration", 0.0))
    if not rows:
        return
    terminalreporter.section("scripts of other projects over this library")
    for nodeid, (outcome, seconds) in sorted(rows.items()):
        file, _, case = nodeid.removeprefix(_FOLDER).partition("::")
        library = Path(file).stem.removeprefix("test_")
        terminalreporter.write_line(f"{library:<20} {case:<90} {outcome:<8} {seconds:6.0f} s")
