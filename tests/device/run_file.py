"""Pytest on files of this directory, as a program that is forked; see conftest.py."""

from __future__ import annotations

import sys

import pytest

# The process is forked from one that has imported a module of pytest's plugins.
_ALREADY_IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"


def main() -> None:
    """Run pytest with the arguments of the program, and end with its exit code."""
    sys.exit(pytest.main(["-p", "no:cacheprovider", "-W", _ALREADY_IMPORTED, *sys.argv[1:]]))
