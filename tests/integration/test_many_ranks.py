"""What a rank takes of its machine for each other rank, which bounds the number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.integration.support.ranks import run_ranks

# The process groups of torch.distributed that a rank on the CPU has: the run's own one, and four of the engine.
GROUPS = 5


def test_a_rank_connects_to_few_others_and_raises_its_limit_of_open_files(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The groups of 16 ranks would have 15 sockets each if every rank connected to all others."""
    ranks: int = pytestconfig.getoption("many_ranks")
    run_ranks("tests.integration.support.many_ranks", ranks, tmp_path)

    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for report in reports:
        assert report["gathered"] == [float(rank) for rank in range(ranks)]
        assert report["mean"] == [sum(range(ranks)) / ranks]
        assert report["rows"] == [*range(ranks), *range(ranks)]
        assert report["soft limit"] == report["hard limit"]
    # Each group has a listening socket. The key-value store has a connection of each rank, and a second one of the
    # watch; rank 0 serves both. The pulse has one, and its exchange of addresses uses one of the groups.
    for rank, report in enumerate(reports):
        counted = report["sockets"]
        of_store = 2 * ranks + 4 if rank == 0 else 4
        of_pulse = 1 + 2 * math.ceil(math.log2(ranks))
        assert counted["made"] - counted["before"] <= GROUPS * 2 + of_store + of_pulse, counted
        assert counted["used"] - counted["made"] <= GROUPS * 2 * math.ceil(math.log2(ranks)), counted
