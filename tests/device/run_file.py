"""The run of pytest on one file of this directory, as a program that is forked; see conftest.py."""

from __future__ import annotations

import sys

import pytest


def main() -> None:
    """Run pytest with the arguments of the program, and end with its exit code."""
    sys.exit(pytest.main(sys.argv[1:]))
