"""The run of one test file of this directory, in a forked process that has not used the device yet; see conftest.py."""

from __future__ import annotations

import sys

import pytest


def main() -> None:
    """Run the file that is the program's argument, and end with pytest's exit code."""
    raise SystemExit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
