"""A rank of a deployment under test: it trains a small model up to a step, and writes what it found to a file.

torchrun ... deployed_rank.py DIRECTORY STEPS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import trainer_client


def main(directory: Path, steps: int) -> None:
    nvme = {"device": "nvme"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    }
    torch.manual_seed(1)
    engine, *_ = trainer_client.initialize(model=torch.nn.Linear(64, 1), config=config)
    with engine:
        for step in range(engine.global_steps, steps):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(4, 64, generator=generator)
            loss = (engine(inputs).squeeze() - inputs.mean(dim=1)).square().mean()
            engine.backward(loss)
            engine.step()
        weight = engine.full_state_dict()["weight"]
        facts = {
            "resumed_step": engine.resumed_step,
            "steps": engine.global_steps,
            "data_plane": engine.data_plane,
            "weights": weight.flatten().tolist(),
            "address": os.environ["PARAMSERVER_ADDRESS"],
        }
    (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
