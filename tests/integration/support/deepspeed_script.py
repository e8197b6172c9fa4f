"""A small training script as DeepSpeed's users write it, with one import changed; run by test_deepspeed_script.py.

Rank 0 prints its losses and the whole weights after the last step as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import nn

import trainer_client as deepspeed
from trainer_client import comm as dist
from trainer_client.accelerator import get_accelerator
from trainer_client.runtime.utils import see_memory_usage
from trainer_client.utils import log_dist, safe_get_full_fp32_param, safe_get_full_grad

SAMPLES = 4
STEPS = 5
RATE = 0.05
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": RATE}},
    "zero_optimization": {"stage": 2},
}


def build() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    get_accelerator().set_device(dist.get_local_rank())

    model = build()
    trained = filter(lambda p: p.requires_grad, model.parameters())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=trained, config_params=CONFIG)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert args.local_rank == dist.get_local_rank() == engine.local_rank
    losses = []
    for step in range(STEPS):
        loss = engine(batch(step, dist.get_rank()).to(engine.device)).square().mean()
        engine.backward(loss)
        assert safe_get_full_grad(model[2].weight) is not None
        engine.step()
        dist.all_reduce(loss.detach())
        losses.append(float(loss))
    see_memory_usage("at the end", force=False)
    log_dist("done", ranks=[0])
    weight = safe_get_full_fp32_param(model[2].weight)
    assert weight is not None
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "weight": weight.flatten().tolist()}))


if __name__ == "__main__":
    main()
