"""One of two ranks that run different code.

Run as `python -m tests.integration.support.diverging ADDRESS REPORTS`, with torchrun's environment variables. Each rank
writes the result of each scene to REPORTS/RANK.json. In the last scene rank 1 exits without closing anything.
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
from tests.integration.support.zoo import Language
from trainer_client import TrainerClientError

TIMEOUT_SECONDS = 6.0
TOKENS = torch.arange(8).view(2, 4)


class Chooser(Language):
    """A model that runs the experts in `order`. All experts have the same size."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(24, 24) for _ in range(4)])
        self.order = [0, 1]

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            hidden = hidden + self.experts[index](hidden)
        return hidden


def start(address: str, job: str, gather: str) -> trainer_client.Engine:
    offload = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 1e-2}},
        "paramserver": {
            "address": address,
            "job": job,
            "durability": "none",
            "gather": gather,
            "collective_timeout_seconds": TIMEOUT_SECONDS,
        },
    }
    return trainer_client.initialize(model=Chooser(), config=config)[0]


def step(engine: trainer_client.Engine, order: list[int]) -> float:
    assert isinstance(engine.module, Chooser)
    engine.module.order = order
    loss = engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
    engine.step()
    return loss.item()


def inference(engine: trainer_client.Engine, order: list[int]) -> float:
    assert isinstance(engine.module, Chooser)
    engine.module.order = order
    with torch.no_grad():
        loss: float = engine(input_ids=TOKENS, labels=TOKENS).loss.item()
    return loss


def failure_of(act: Callable[[], Any]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        act()
    except TrainerClientError as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    return {"kind": "none", "text": "", "seconds": time.monotonic() - begun}


def different_experts(address: str, rank: int, _: Path) -> dict[str, Any]:
    """Use different experts in the first step, which has no trace: the ranks compare the units that they want."""
    with start(address, "different-experts", "collective") as engine:
        return failure_of(lambda: step(engine, [0, 1 + rank]))


def an_unexpected_expert(address: str, rank: int, _: Path) -> dict[str, Any]:
    """Let one rank use another expert than the last step, whose order both ranks expect."""
    with start(address, "unexpected", "collective") as engine:
        step(engine, [0, 1, 2])
        step(engine, [0, 1, 2])
        return failure_of(lambda: step(engine, [0, 3 if rank else 1, 2]))


def an_idle_rank(address: str, rank: int, reports: Path) -> dict[str, Any]:
    with start(address, "idle", "collective") as engine:
        step(engine, [0, 1])
        if rank == 0:
            return failure_of(lambda: step(engine, [0, 1]))
        while json.loads((reports / "0.json").read_text())["an_idle_rank"] is None:
            time.sleep(0.1)
        return failure_of(lambda: step(engine, [0, 1]))


def one_sided(address: str, rank: int, _: Path) -> dict[str, Any]:
    """Use other experts in another order on each rank, and run inference on rank 0 alone between steps."""
    with start(address, "one-sided", "store") as engine:
        losses = []
        for index in range(4):
            if rank == 0:
                inference(engine, [3, 1])
            losses.append(step(engine, [[0, 1, 2, 0], [2, 0]][rank] if index % 2 else [[3], [1, 2]][rank]))
        weights = engine.full_state_dict()
    return {"losses": losses, "sums": {name: value.double().sum().item() for name, value in weights.items()}}


def a_rank_that_reads_last(address: str, rank: int, _: Path) -> dict[str, Any]:
    """Let rank 0 run the model when rank 1 is already leaving its engine."""
    with start(address, "reads-last", "store") as engine:
        step(engine, [0, 1])
        losses = [inference(engine, [2])]
        if rank == 0:
            time.sleep(1.0)
            losses.append(inference(engine, [2]))
    return {"losses": losses}


def a_rank_that_dies(address: str, rank: int, _: Path) -> dict[str, Any]:
    engine = start(address, "dies", "store")
    step(engine, [0, 1])
    if rank == 1:
        os._exit(0)
    return failure_of(lambda: step(engine, [0, 1]))


SCENES = [different_experts, an_unexpected_expert, an_idle_rank, one_sided, a_rank_that_reads_last, a_rank_that_dies]


def main() -> None:
    address, reports = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = dict.fromkeys(scene.__name__ for scene in SCENES)

    def report() -> None:
        written = reports / f"{rank}.partial"
        written.write_text(json.dumps(results))
        written.rename(reports / f"{rank}.json")

    report()
    dist.barrier()
    for scene in SCENES:
        results[scene.__name__] = scene(address, rank, reports)
        report()
    # Rank 1 has exited, so the process group cannot be destroyed in order.
    os._exit(0)


if __name__ == "__main__":
    main()
