"""One rank that builds, fills and trains a model eight times as large as the store's host memory, and measures memory.

Run by test_memory.py: `python -m tests.integration.support.memory_ranks DIRECTORY SMALL LARGE`, where the last two are
the addresses of the daemons for the small and for the large model. There are two independent counts: the bytes of all
parameters and gradients, counted in each module's forward and backward, and the kernel's count of the process's private
memory, read all the time.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

import trainer_client
from trainer_client import zero

MIB = 1 << 20
WIDTH = 512
UNIT_BYTES = WIDTH * WIDTH * 4
MODEL_UNITS = 96
TRAINABLE_EVERY = 32
HOST_BUDGET = MODEL_UNITS * UNIT_BYTES // 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden)) / MODEL_UNITS


class MostlyFrozen(nn.Module):
    """A model of `units` units of UNIT_BYTES (in fp32) each, of which one belongs to the root.

    Most units are frozen, as with adapters. Gradients stay in host memory until they are used, so a model of many times
    that memory cannot train all its units.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(units - 1)])
        for index, block in enumerate(self.blocks):
            block.requires_grad_(index % TRAINABLE_EVERY == 0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


class Counter:
    """A counter of the most bytes of parameters and gradients that existed in any forward or backward."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        self._model = model

    def install(self) -> None:
        for block in self._model.modules():
            block.register_forward_pre_hook(self._look)
            block.register_forward_hook(self._look)
            block.register_full_backward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        parameters = list(self._model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*parameters, *gradients)}
        self.most = max(self.most, sum(storages.values()))


class PrivateMemory:
    """The peak of this process's private memory (the kernel's RssAnon) while it is watched, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @contextmanager
    def watched(self) -> Iterator[int]:
        """Watch the memory during the block; yield the bytes at its start."""
        start = self._now()
        self._thread.start()
        try:
            yield start
        finally:
            self._over.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def config(address: str, *, bf16: bool) -> dict[str, Any]:
    nvme = {"device": "nvme"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "paramserver": {"address": address},
    }


def measure(address: str, weights: Path | None, *, units: int, bf16: bool) -> dict[str, int]:
    """Build, fill and train a model; return the peak of each count, without the memory before it."""
    memory = PrivateMemory()
    with memory.watched() as start:
        with zero.Init(seed=7):
            model = MostlyFrozen(units)
        engine, *_ = trainer_client.initialize(model=model, config=config(address, bf16=bf16), weights=weights)
        initialised = memory.peak - start
        with engine:
            if weights is not None:
                check_values(engine, weights)
            counter = Counter(model)
            counter.install()
            for _ in range(2):
                engine.backward(engine(torch.randn(2, WIDTH)))
                engine.step()
    return {
        "parameters": counter.most,
        "initialised": initialised,
        "peak": memory.peak - start,
    }


def check_values(engine: trainer_client.Engine, weights: Path) -> None:
    with safe_open(weights, "pt") as stored:
        for name in ("first.weight", "blocks.0.linear.weight", "blocks.77.linear.weight"):
            mine = engine.get_full(name, "param")
            assert mine is not None
            assert torch.equal(mine, stored.get_tensor(name).to(mine.dtype)), name


def main() -> None:
    directory = Path(sys.argv[1])
    small, large = sys.argv[2:]
    dist.init_process_group("gloo")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    bf16 = world_size > 1
    # A first small model makes the process allocate all memory that does not depend on the model's size.
    measure(small, None, units=3, bf16=bf16)
    gc.collect()
    weights = directory / "model.safetensors" if world_size > 1 else None
    counts = measure(large, weights, units=MODEL_UNITS, bf16=bf16)
    (directory / f"counts-{rank}.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
