"""Pytest on one file as the suite runs it, where no library of the device is kept: `main` of PATH and FILE.

It runs in a process of its own, with an environment in which there is no compiler.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.device import native_build, run_file


def main() -> None:
    """Look for libraries below the program's first argument, and run the file that the second one names."""
    native_build.KEPT = Path(sys.argv.pop(1))
    run_file.main()
