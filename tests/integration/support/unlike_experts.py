"""One of two ranks that use other experts of the same blocks; run by test_divergence.py.

Run as `python -m tests.integration.support.unlike_experts ADDRESS RESULTS`, with torchrun's environment variables. Rank
0 writes the weights of each scene to RESULTS.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import trainer_client

WIDTH = 16
BLOCKS = 4
# Elements of the root and of one block.
ROOT, BLOCK = 2 * WIDTH * (WIDTH + 1), 3 * WIDTH * (WIDTH + 1)
EXPERTS = (("0",), ("0", "1"))
SCENES: dict[str, dict[str, Any]] = {
    "reentrant": {"reentrant": True},
    "non-reentrant": {"reentrant": False},
    # The limit has room for the root and two blocks, so the ranks have to release the same ones.
    "some stay gathered": {"live": ROOT + 2 * BLOCK},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("0", "1")})
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, chosen: tuple[str, ...]) -> torch.Tensor:
        mixed: torch.Tensor = self.out(torch.tanh(torch.stack([self.experts[name](hidden) for name in chosen]).sum(0)))
        return hidden + mixed


class Mixture(nn.Module):
    """A model whose last block runs the `chosen` experts; the others run both."""

    def __init__(self, reentrant: bool | None) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, chosen: tuple[str, ...]) -> torch.Tensor:
        hidden = self.inner(hidden)
        for index, block in enumerate(self.blocks):
            experts = chosen if index == BLOCKS - 1 else EXPERTS[1]
            if self.reentrant is None:
                hidden = block(hidden, experts)
            else:
                hidden = checkpoint(block, hidden, experts, use_reentrant=self.reentrant)
        loss: torch.Tensor = self.outer(hidden).square().mean()
        return loss


def config(address: str, name: str, live: int | None) -> dict[str, Any]:
    offload = {"device": "cpu"}
    zero: dict[str, Any] = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "zero_optimization": zero | ({} if live is None else {"stage3_max_live_parameters": live}),
        "paramserver": {"address": address, "job": name, "gather": "collective", "collective_timeout_seconds": 20},
    }


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(6)]


def train(address: str, scene: str, rank: int) -> dict[str, torch.Tensor]:
    values = SCENES[scene]
    model = Mixture(values.get("reentrant"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = config(address, scene.replace(" ", "-"), values.get("live"))
    engine = trainer_client.initialize(model=model, optimizer=optimizer, config=settings)[0]
    with engine:
        for batch in batches(rank):
            engine.backward(engine(batch, EXPERTS[rank]))
            engine.step()
        return engine.full_state_dict()


def train_plain(rank: int) -> dict[str, torch.Tensor]:
    """Train with torch's DDP, without checkpoints, which change no bit."""
    model = Mixture(None)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches(rank)):
        with ddp.no_sync() if number % 2 == 0 else nullcontext():
            (ddp(batch, EXPERTS[rank]) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def main() -> None:
    address, results = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {scene: train(address, scene, rank) for scene in SCENES}
    found["plain"] = train_plain(rank)
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
