"""One of two ranks that export steps while they train; run by test_export.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import trainer_client
from tests.integration.support.model_runs import config_of, start


def train(engine: trainer_client.Engine, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()


def main() -> None:
    address, directory = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    expected = {}
    with start(nn.Linear(64, 64), config_of(address, "two ranks export", durability="none")) as engine:
        train(engine, 1)
        for step in range(1, 17, 5):
            expected[step] = engine.full_state_dict()
            # The next steps follow at once, while the store holds this one for the export.
            pending = engine.export("safetensors", directory / str(step))
            assert (pending is not None) == (rank == 0)
            train(engine, 5)
        if rank == 0:
            with pytest.raises(trainer_client.ExportError, match="exists"):
                engine.export("safetensors", directory)
        else:
            # This rank does not hear of the error, and goes on.
            assert engine.export("safetensors", directory) is None
        train(engine, 1)
    if rank == 0:
        for step, weights in expected.items():
            exported = load_file(directory / str(step) / "model.safetensors")
            assert exported.keys() == weights.keys()
            assert all(torch.equal(exported[name], weights[name]) for name in weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
