"""Ranks that no launcher has numbered on their node, because torch.multiprocessing or `debug_launcher` starts them.

`spawned_ranks.py HOW DIRECTORY` trains on two ranks, whose process group is made by `debug_launcher` ("group"), or by
the engine of the launcher's variables ("variables"). Each writes its number on the node and the pid of its daemon.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import debug_launcher
from torch import nn
from torch.multiprocessing.spawn import spawn

import trainer_client
from tests.integration.support.ranks import free_port

NUMBERED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def train(directory: Path) -> None:
    store = {"state_dir": str(directory / "state"), "host_budget": "64MiB", "nvme_budget": "256MiB"}
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "paramserver": store,
    }
    engine, *_ = trainer_client.initialize(model=nn.Linear(4, 4), config=config)
    with engine:
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        lock = (directory / "state/lock").read_text()
        facts = {"rank": engine.global_rank, "local": [engine.local_rank, trainer_client.comm.get_local_rank()]}
        (directory / f"{engine.global_rank}.json").write_text(json.dumps(facts | {"daemon": int(lock)}))


def spawned(rank: int, directory: Path, port: int) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"})
    train(directory)
    assert not dist.is_initialized()


def main(how: str, directory: Path) -> None:
    for name in NUMBERED:
        os.environ.pop(name, None)
    if how == "group":
        debug_launcher(train, (directory,), num_processes=2)
    else:
        spawn(spawned, (directory, free_port()), nprocs=2)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
