"""Each file of this directory runs in a process of its own, in which the simulated device is torch's accelerator.

A process cannot get rid of the device again, and everything in it would use the device. So the outer run of pytest has
one test for each file, which runs pytest on that file in another process. That is forked from one that has imported
all (tests/integration/support/forked.py). With PARAMSERVER_ON_DEVICE=1 there is no outer run, so that one test can be
chosen.

Without a C++ compiler the tests are skipped; with PARAMSERVER_REQUIRE_DEVICE=1 they fail then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import lag, native_build
from tests.integration.support.forked import Forked

ON_DEVICE = "PARAMSERVER_ON_DEVICE"
REQUIRED = "PARAMSERVER_REQUIRE_DEVICE"
# A file's tests together, and the compilation.
FILE_SECONDS = 1200


class FileInOtherProcess(pytest.File):
    """A test file of this directory, as the outer run sees it."""

    def collect(self) -> Iterator[pytest.Item]:
        item = RunOfFile.from_parent(self, name="on_the_device")
        item.add_marker(pytest.mark.timeout(FILE_SECONDS))
        yield item


class RunOfFile(pytest.Item):
    """The run of one file in another process."""

    def runtest(self) -> None:
        try:
            native_build.library()
        except native_build.NoCompilerError as error:
            if os.environ.get(REQUIRED):
                pytest.fail(f"{error} ({REQUIRED} is set)", pytrace=False)
            pytest.skip(str(error))
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "log"
            run = Forked(
                "tests.device.run_file",
                [str(self.path)],
                # torch allows one kind of accelerator in a process. Some tests compare its bits with those of the CPU,
                # which in a forked process are the same only if both compute with one thread.
                environment=own | {ON_DEVICE: "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                log=log,
            )
            try:
                code = run.wait()
            finally:
                run.kill()
            if code != 0:
                pytest.fail(f"exit code {code}\n{log.read_text()}", pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name}, on the device"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a file as one test of the outer run. On the device return None, so that pytest collects it."""
    if os.environ.get(ON_DEVICE):
        lag.load()
        return None
    return FileInOtherProcess.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """The device of this process, as new; no test leaves races that it did not look at."""
    lag.reset()
    yield
    found = [str(race) for race in lag.races()]
    lag.reset()
    assert found == [], "races that the test did not expect"
