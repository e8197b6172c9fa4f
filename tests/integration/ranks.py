"""Programs on several ranks: each rank is a process, and checks on its own what it sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.training import ROOT, free_port


def run_ranks(module: str, world_size: int, directory: Path, timeout_seconds: float = 200.0) -> list[str]:
    """Runs `python -m module directory` on `world_size` ranks; what each printed. A rank that fails fails the test."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(directory)],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode != 0]
    assert not failed, "\n".join(f"rank {n} ended with {ranks[n].returncode}:\n{outputs[n]}" for n in failed)
    return outputs
