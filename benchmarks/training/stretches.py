"""Stretches of training steps at a daemon, for benchmarks that compare models which train in turns.

All models of such a benchmark have the same layers and all states on NVMe, and differ in what their daemon does beside.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainer_client
from benchmarks.common.machine import describe, provenance


def blocks_of(arguments: argparse.Namespace, *, frozen: int = 0) -> list[nn.Module]:
    """Return the layers of the model, the same values each time, of which the first `frozen` are not trained."""
    torch.manual_seed(0)
    width = arguments.width
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(arguments.layers)]
    for block in blocks[:frozen]:
        block.requires_grad_(False)
    return blocks


class StretchedRun:
    """One model at one daemon, with all states on NVMe, trained by one rank."""

    def __init__(self, blocks: Sequence[nn.Module], section: Mapping[str, Any], arguments: argparse.Namespace) -> None:
        """Start the engine; `section` is the config's section `paramserver`, with the address of the daemon."""
        nvme = {"device": "nvme"}
        config = {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "paramserver": dict(section),
        }
        self.engine = trainer_client.initialize(model=nn.Sequential(*blocks), config=config)[0]
        self._inputs = torch.randn(arguments.batch, arguments.width)

    def train_stretch(self, steps: int) -> float:
        """Train a stretch of steps, and return its seconds until the last commit; earlier commits do not count."""
        self.engine.wait_for_commit()
        began = time.perf_counter()
        for _ in range(steps):
            self.engine.backward(self.engine(self._inputs).square().mean())
            self.engine.step()
        self.engine.wait_for_commit()
        return time.perf_counter() - began


def run_benchmark(
    description: str | None,
    measure: Callable[[argparse.Namespace, Path], Mapping[str, Any]],
    *,
    pairs: int,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda _: None,
) -> None:
    """Measure, and print one line of JSON: what `measure` returns, given a directory, and where it was measured.

    The command has the options of all such benchmarks, and those that `add_options` adds.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--width", type=int, default=1024, help="width of the model's layers")
    parser.add_argument("--layers", type=int, default=12, help="their number")
    parser.add_argument("--batch", type=int, default=512, help="samples in a step")
    parser.add_argument("--steps", type=int, default=8, help="steps in a stretch")
    parser.add_argument("--pairs", type=int, default=pairs, help="rounds of stretches after the one that warms up")
    add_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        machine = describe(Path(directory))
        figures = measure(arguments, Path(directory))
    extra = {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "load": os.getloadavg()[0]}
    print(json.dumps({**figures, **extra, "machine": machine, "commit": provenance()}))
