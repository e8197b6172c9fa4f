"""Fine-tuning of a language model as a script of DeepSpeed: ZeRO-3 with offload to the CPU, and checkpoints.

    torchrun --nproc-per-node 2 -m trainer_client.as_deepspeed examples/deepspeed_finetune.py

Without `-m trainer_client.as_deepspeed`, DeepSpeed itself runs it. The model is a small GPT-2, which is built under
`zero.Init` and gets the weights of `--base`. Kill the script when it has saved a checkpoint, and start it again with
`--resume`: it goes on from there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

VOCABULARY = 64
LENGTH = 24


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up by one, two or three, with some noise."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        own = torch.Generator().manual_seed(index)
        first = torch.randint(VOCABULARY, (1,), generator=own)
        step = torch.randint(1, 4, (1,), generator=own)
        tokens = (first + step * torch.arange(LENGTH)) % VOCABULARY
        noise = torch.rand(LENGTH, generator=own) < 0.05
        tokens = torch.where(noise, torch.randint(VOCABULARY, (LENGTH,), generator=own), tokens)
        return {"input_ids": tokens, "labels": tokens}


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="fine-tuning of a causal language model")
    parser.add_argument("--base", type=Path, help="the weights to begin with: a state_dict that torch.save has written")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("finetuned"))
    parser.add_argument("--save_interval", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in output_dir")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument("--loss_file", type=Path, help="a line of JSON is added for each step")
    return parser.parse_args()


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config for the arguments."""
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": args.learning_rate, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": args.learning_rate, "warmup_num_steps": 5, "total_num_steps": 100},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 1000,
            "stage3_max_live_parameters": 1000000,
            "stage3_prefetch_bucket_size": 10000,
        },
    }


def base_weights(args: argparse.Namespace, shape: GPT2Config) -> dict[str, torch.Tensor]:
    """Return the weights to begin with; without `--base`, those of a new model."""
    if args.base is not None:
        weights: dict[str, torch.Tensor] = torch.load(args.base, weights_only=True)
        return weights
    torch.manual_seed(7)
    return GPT2LMHeadModel(shape).state_dict()


def build(args: argparse.Namespace, config: dict[str, Any]) -> nn.Module:
    """Return the model, divided among the ranks from the beginning, with the weights that rank 0 has loaded."""
    shape = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT2LMHeadModel(shape)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            model.load_state_dict(base_weights(args, shape))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of parameters: biases and the weights of norms do not decay."""
    decaying = {name for name, _ in model.named_parameters() if not name.endswith("bias") and "ln_" not in name}
    return [
        {"params": [p for name, p in model.named_parameters() if name in decaying], "weight_decay": weight_decay},
        {"params": [p for name, p in model.named_parameters() if name not in decaying], "weight_decay": 0.0},
    ]


def batches(args: argparse.Namespace, consumed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's batches without end, without the first `consumed`."""
    data = Sentences(128)
    sampler: DistributedSampler[dict[str, torch.Tensor]] = DistributedSampler(
        data, num_replicas=deepspeed.comm.get_world_size(), rank=deepspeed.comm.get_rank(), seed=3, drop_last=True
    )
    loader = DataLoader(
        data, args.per_device_train_batch_size, sampler=sampler, collate_fn=default_data_collator, drop_last=True
    )
    for epoch in range(consumed // len(loader), 1 << 30):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, start=epoch * len(loader)):
            if number >= consumed:
                yield batch


def main() -> None:
    """Train until `--steps`, from the beginning or from a checkpoint."""
    args = parse_arguments()
    deepspeed.init_distributed()
    config = deepspeed_config(args)
    model = build(args, config)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model, args.weight_decay), config=config
    )
    consumed = 0
    if args.resume:
        path, client_state = engine.load_checkpoint(str(args.output_dir))
        if path is None:
            raise SystemExit(f"{args.output_dir} has no checkpoint")
        consumed = client_state["consumed"]

    engine.train()
    total = torch.zeros((), device=engine.device)
    for batch in batches(args, consumed):
        inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        loss = engine(**inputs).loss
        total += loss.detach().float() / engine.gradient_accumulation_steps()
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(loss)
        engine.step()
        consumed += 1
        if not is_boundary:
            continue

        deepspeed.comm.all_reduce(total)
        line = {
            "step": engine.global_steps,
            "loss": total.item() / deepspeed.comm.get_world_size(),
            "norm": float(engine.get_global_grad_norm()),
            "rate": engine.get_lr()[0],
        }
        total.zero_()
        if engine.global_rank == 0:
            print(" ".join(f"{name} {value:.6g}" for name, value in line.items()), flush=True)
            if args.loss_file is not None:
                with args.loss_file.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        if engine.global_steps % args.save_interval == 0:
            engine.save_checkpoint(str(args.output_dir), client_state={"consumed": consumed})
        if engine.global_steps >= args.steps:
            break
    engine.destroy()


if __name__ == "__main__":
    main()
