"""One rank that goes on from an imported job up to a step; run by test_import.py.

The arguments are the store's address, the job, the step and the file for the mean losses of the global batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_client
from tests.integration.support.training import LENGTH, Run, build_model

# The number of samples in a step. It is the same for any number of ranks that divides it.
BATCH = 6


def global_batch(step: int) -> torch.Tensor:
    """Return the tokens of a step, [BATCH, LENGTH]."""
    return torch.randint(0, 40, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def main() -> None:
    address, job, until, result = sys.argv[1:]
    model = build_model(Run())
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "paramserver": {"address": address, "job": job},
    }
    losses = []
    with trainer_client.initialize(model=model, config=config)[0] as engine:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for step in range(engine.global_steps, int(until)):
            batch = global_batch(step).chunk(ranks)[rank]
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / ranks)
        if rank == 0:
            Path(result).write_text(json.dumps(losses))
