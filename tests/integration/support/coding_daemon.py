"""A daemon with the codec of the tests, which stands for one of a later release that has a codec."""

from __future__ import annotations

from paramserver import cli
from tests.unit.storage.root_codec import ROOT

__all__ = ["ROOT", "main"]

main = cli.main
