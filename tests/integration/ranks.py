"""Programs on several ranks: each rank is a process of its own, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.integration.daemon import ROOT


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def environments(world_size: int) -> list[Mapping[str, str]]:
    """The environment of each rank of one launch."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def run_ranks(
    module: str, world_size: int, *arguments: str | Path, exit_code: int = 0, timeout_seconds: float = 200.0
) -> None:
    """Runs `python -m module arguments` on `world_size` ranks, which must all end with `exit_code`."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for environment in environments(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode != exit_code]
    assert not failed, "\n".join(f"rank {n} ended with {ranks[n].returncode}:\n{outputs[n]}" for n in failed)
