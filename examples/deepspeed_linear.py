"""The smallest script of DeepSpeed: a linear model, Adam at stage 2, and three lines of a loop.

    torchrun --nproc-per-node 2 -m trainer_client.as_deepspeed examples/deepspeed_linear.py

Without `-m trainer_client.as_deepspeed`, DeepSpeed itself runs it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    """Train to find the weights of another linear model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--loss_file", type=Path, help="the loss of each step of all ranks, as JSON")
    args = parser.parse_args()
    deepspeed.init_distributed()

    torch.manual_seed(0)
    sought = torch.nn.Linear(16, 4)
    model = torch.nn.Linear(16, 4)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=filter(lambda p: p.requires_grad, model.parameters()), config_params=CONFIG
    )
    torch.manual_seed(1 + deepspeed.comm.get_rank())
    losses = []
    for _ in range(args.steps):
        inputs = torch.randn(8, 16)
        targets = sought(inputs).detach()
        loss = torch.nn.functional.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / deepspeed.comm.get_world_size())

    if deepspeed.comm.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} in the end")
        if args.loss_file is not None:
            args.loss_file.write_text(json.dumps({"losses": losses}))
    engine.destroy()


if __name__ == "__main__":
    main()
