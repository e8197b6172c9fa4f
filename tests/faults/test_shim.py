"""A process loads the shim, wherever the temporary directory is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import shim

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no `cc` on the PATH to compile the shim")


def test_it_is_loaded_from_a_directory_whose_path_has_spaces(tmp_path: Path) -> None:
    directory = tmp_path / "a directory with spaces"
    directory.mkdir()
    program = "from tests.faults import shim; print(shim.calls())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=shim.environment(shim.build(directory)),
        capture_output=True,
        text=True,
        check=False,
    )
    # The loader writes to stderr if it cannot preload a library.
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)
