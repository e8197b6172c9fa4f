"""One of three ranks that were started with different configs.

Run as `python -m tests.integration.support.mismatched_ranks DIRECTORY`, with torchrun's environment variables. Each
rank writes the error of `initialize` in each scene to DIRECTORY/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client
from trainer_client.errors import TrainerClientError


def model(widths: tuple[int, ...] = (8, 8, 8), *, frozen: int | None = None) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(8, width) for width in widths]
    for index, layer in enumerate(layers):
        layer.requires_grad_(index != frozen)
    return nn.ModuleDict({f"layer{index}": layer for index, layer in enumerate(layers)})


def config(directory: Path, rank: int, **section: Any) -> dict[str, Any]:
    offload = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        # This key may differ between ranks, because only rank 0 prints.
        "steps_per_print": 10 + rank,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "paramserver": {
            "state_dir": str(directory / "state"),
            "host_budget": "32MiB",
            "nvme_budget": "64MiB",
            "collective_timeout_seconds": 60.0,
            **section,
        },
    }


def stage(directory: Path, rank: int) -> None:
    made = config(directory, rank)
    if rank == 1:
        made["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        made["bf16"] = {"enabled": True}
    trainer_client.initialize(model=model(), config=made)


def state_dir(directory: Path, rank: int) -> None:
    made = config(directory, rank, state_dir=str(directory / f"state-of-{rank}"), host_budget=f"{32 + rank // 2}MiB")
    trainer_client.initialize(model=model(), config=made)


def job(directory: Path, rank: int) -> None:
    trainer_client.initialize(model=model(), config=config(directory, rank, job="one" if rank else "another"))


def own_daemon(directory: Path, rank: int) -> None:
    made = config(directory, rank)
    if rank == 2:
        section = made["paramserver"]
        for key in ("state_dir", "host_budget", "nvme_budget"):
            del section[key]
        section["address"] = "unix:/nowhere/paramserver.sock"
    trainer_client.initialize(model=model(), config=made)


def batch(directory: Path, rank: int) -> None:
    made = config(directory, rank) | {"train_micro_batch_size_per_gpu": 2 + rank}
    trainer_client.initialize(model=model(), config=made)


def shape(directory: Path, rank: int) -> None:
    widths = (8, 8, 16) if rank == 2 else (8, 8, 8)
    trainer_client.initialize(model=model(widths), config=config(directory, rank))


def fewer_layers(directory: Path, rank: int) -> None:
    trainer_client.initialize(model=model((8, 8) if rank else (8, 8, 8)), config=config(directory, rank))


def frozen(directory: Path, rank: int) -> None:
    trainer_client.initialize(model=model(frozen=1 if rank == 0 else None), config=config(directory, rank))


def optimizer(directory: Path, rank: int) -> None:
    built = model()
    chosen = torch.optim.AdamW(built.parameters(), lr=0.5 if rank == 1 else 0.25, fused=True)
    trainer_client.initialize(model=built, optimizer=chosen, config=config(directory, rank))


def argument(directory: Path, rank: int) -> None:
    built = model()
    given = {"unit_policy": lambda whole: list(whole.children())} if rank == 0 else {}
    trainer_client.initialize(model=built, config=config(directory, rank), **given)  # type: ignore[arg-type]


def nodes(directory: Path, rank: int) -> None:
    """Start two nodes with different directories and budgets, which is valid. Rank 2 is alone on the second node."""
    node = rank // 2
    os.environ["LOCAL_RANK"] = str(rank % 2)
    made = config(directory, rank, state_dir=str(directory / f"node{node}"), host_budget=f"{32 + node}MiB")
    engine = trainer_client.initialize(model=model(), config=made)[0]
    engine.close()


SCENES: list[Callable[[Path, int], None]] = [
    *(stage, state_dir, job, own_daemon, batch, shape, fewer_layers, frozen, optimizer, argument, nodes)
]


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    for scene in SCENES:
        begun = time.monotonic()
        report = {"kind": "none", "text": ""}
        try:
            scene(directory, rank)
        except TrainerClientError as error:
            report = {"kind": type(error).__name__, "text": str(error)}
        results[scene.__name__] = report | {"seconds": time.monotonic() - begun}
        dist.barrier()
    (directory / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
