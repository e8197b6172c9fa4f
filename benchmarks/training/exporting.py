"""How much an export slows the steps of the run beside it: one rank, with one thread, whose states are all on NVMe.

Stretches of steps take turns: alone, and beside exports that follow each other. The result is the median of the ratios
of the pairs, with the smallest and the largest. `python -m benchmarks.training.exporting` prints it; OMP_NUM_THREADS=1
leaves the other cores to the store and to the export.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import trainer_client
from benchmarks.common.machine import describe, provenance
from trainer_client.exchange.export import PendingExport


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="width of the model's layers")
    parser.add_argument("--layers", type=int, default=12, help="their number")
    parser.add_argument("--batch", type=int, default=256, help="samples in a step")
    parser.add_argument("--steps", type=int, default=4, help="steps in a stretch")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of stretches after the one that warms up")
    parser.add_argument("--format", default="safetensors", help="format of the exports")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(arguments.width, arguments.width), nn.GELU()) for _ in range(arguments.layers)]
    model = nn.Sequential(*blocks)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        machine = describe(Path(directory))
        nvme = {"device": "nvme", "nvme_path": directory}
        config = {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        }
        with trainer_client.initialize(model=model, config=config)[0] as engine:
            runs = _Runs(engine, torch.randn(arguments.batch, arguments.width), Path(directory), arguments)
            pairs = [(runs.alone(), runs.beside()) for _ in range(arguments.pairs + 1)][1:]
        ratios = [beside / alone for alone, beside in pairs]
    print(
        json.dumps(
            {
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
                "seconds_alone": [round(alone, 3) for alone, _ in pairs],
                "seconds_beside": [round(beside, 3) for _, beside in pairs],
                "staged_seconds": round(statistics.median(runs.staged), 4),
                "exports": runs.exports,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "threads": os.environ.get("OMP_NUM_THREADS", "all"),
                "load": os.getloadavg()[0],
                "machine": machine,
                "commit": provenance(),
            }
        )
    )


class _Runs:
    """Stretches of steps of one engine.

    Attributes:
        staged: the seconds that each call of `engine.export` took.
        exports: the number of complete exports.
    """

    def __init__(
        self, engine: trainer_client.Engine, inputs: torch.Tensor, directory: Path, arguments: argparse.Namespace
    ) -> None:
        self.staged: list[float] = []
        self.exports = 0
        self._engine = engine
        self._inputs = inputs
        self._directory = directory
        self._arguments = arguments

    def alone(self) -> float:
        """Return the seconds of a stretch without an export."""
        return self._timed(None)

    def beside(self) -> float:
        """Return the seconds of a stretch beside exports."""
        return self._timed(self._export())

    def _timed(self, pending: PendingExport | None) -> float:
        self._engine.wait_for_commit()
        began = time.perf_counter()
        for _ in range(self._arguments.steps):
            if pending is not None and pending.persisted.done():
                pending = self._export()
            self._engine.backward(self._engine(self._inputs).square().mean())
            self._engine.step()
        self._engine.wait_for_commit()
        seconds = time.perf_counter() - began
        if pending is not None:
            pending.persisted.result()
        return seconds

    def _export(self) -> PendingExport:
        began = time.perf_counter()
        pending = self._engine.export(self._arguments.format, self._directory / "export", overwrite=True)
        assert pending is not None
        self.staged.append(time.perf_counter() - began)
        self.exports += 1
        return pending


if __name__ == "__main__":
    main()
