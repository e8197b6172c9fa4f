"""A script with the Trainer of transformers, as its users write it: it does not know which `deepspeed` it gets.

`trainer_script.py RESULT.json [CONFIG.json] [save|resume]` trains a small GPT-2 and writes the losses of rank 0 to the
file, with the config as `--deepspeed`, or without DeepSpeed.

With `save` it trains for one epoch, evaluates and saves every second step, keeps two checkpoints, and at the end loads
the one with the highest loss, which is the first. With `resume` it goes on from that one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SAVING: dict[str, Any] = {
    "num_train_epochs": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "greater_is_better": True,
}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, which depend on their number only."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main(result: Path, deepspeed: str | None = None, checkpoints: str | None = None) -> None:
    torch.manual_seed(0)
    shape = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32)
    shape.attn_pdrop = shape.embd_pdrop = shape.resid_pdrop = 0.0
    arguments = TrainingArguments(
        output_dir=str(result.parent / "trainer"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        **(SAVING if checkpoints else {"num_train_epochs": 2, "save_strategy": "no"}),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        deepspeed=deepspeed,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(shape), args=arguments, train_dataset=Tokens(), eval_dataset=Subset(Tokens(), range(8))
    )
    trainer.train(resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-2" if checkpoints == "resume" else None)
    best = [trainer.state.best_metric, trainer.evaluate()["eval_loss"]] if checkpoints else []
    if trainer.is_world_process_zero():
        history = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        result.write_text(json.dumps([*history, *([best] if best else [])]))
    if deepspeed is None:
        # torch has been seen to abort if the interpreter ends while a process group of gloo is open.
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
