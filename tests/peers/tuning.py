"""A script that tunes a pretrained model with the Trainer of transformers, as its users write it.

`tuning.py MODEL OUTPUT [--deepspeed CONFIG] [--lora] [--resume] [--killed-before STEP]` loads the model, gives it rows
for new tokens, adds adapters with `--lora`, and trains for six steps with a checkpoint after each second one.
"""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

ROWS = 57
STEPS = 6


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, which depend on their number only."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, ROWS, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Killer(TrainerCallback):
    """Kills the process before a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def writable(tensor: torch.Tensor) -> AbstractContextManager[None]:
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed  # noqa: PLC0415 - it is there only where the script runs over it

    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters([tensor, None], modifier_rank=0)
    return context


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--deepspeed")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--killed-before", type=int)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    arguments = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=1e-2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        deepspeed=options.deepspeed,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(options.model)
    old = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(ROWS, mean_resizing=False)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad(), writable(embedding):
        embedding[old:] = embedding[:old].mean(0)
    if options.lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, r=4))
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    if options.killed_before is not None:
        trainer.add_callback(Killer(options.killed_before))
    trainer.train(resume_from_checkpoint=options.resume or None)


if __name__ == "__main__":
    main()
