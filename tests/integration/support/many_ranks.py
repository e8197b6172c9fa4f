"""One of many ranks that do nothing but exchange what the ranks of an engine exchange.

Run as `python -m tests.integration.support.many_ranks REPORTS`, with torchrun's environment variables. Each rank writes
what it has counted to REPORTS/RANK.json.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from trainer_client.config.loading import load_config
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.node_store import join_processes

SOFT_LIMIT = 256


def sockets() -> int:
    """Return the number of sockets that this process has open."""
    return sum(str(link.readlink()).startswith("socket:") for link in _links())


def _links() -> list[Path]:
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            link.readlink()
        except FileNotFoundError:
            # This is the descriptor of the listing itself, which has ended.
            continue
        links.append(link)
    return links


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    before = sockets()
    with ExitStack() as processes:
        _, device = join_processes(load_config({"train_batch_size": 1024}, {}, set()), None, 0, processes)
        collectives = Collectives(device, timeout_seconds=100.0)
        processes.callback(collectives.close)
        made = sockets()
        world, rank = collectives.world_size, collectives.rank
        gathered = torch.empty(world * 16)
        collectives.gather_unit(gathered, torch.full((16,), float(rank)), "a unit")
        part = torch.empty(16)
        collectives.reduce_scatter(part, torch.full((world * 16,), float(rank)))
        collectives.broadcast(gathered)
        header = torch.tensor([rank])
        rows = collectives.start_gather_headers(header, "a header").wait()
        exchanged = collectives.start_exchange(header, "an order").wait()
        report = {
            "sockets": {"before": before, "made": made, "used": sockets()},
            "soft limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "hard limit": hard,
            "gathered": gathered[::16].tolist(),
            "mean": part.unique().tolist(),
            "rows": [*rows.flatten().tolist(), *exchanged.flatten().tolist()],
        }
        collectives.barrier()
        (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
