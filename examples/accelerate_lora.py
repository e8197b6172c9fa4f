"""Supervised fine-tuning of LoRA adapters with peft and Accelerate's loop, as trl's SFTTrainer does it.

    python examples/accelerate_lora.py
    torchrun --nproc-per-node 2 examples/accelerate_lora.py

The base is a small GPT-2, made from its config, and is frozen: the store has no optimizer states of it. The loss counts
the completions only, whose tokens repeat those of the prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 48
PROMPT = 6
IGNORED = -100


class Completions(Dataset[dict[str, torch.Tensor]]):
    """Prompts with their completions, which depend on their number only. The labels leave the prompts out."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self._size:
            raise IndexError(index)
        prompt = torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(index))
        labels = torch.cat((torch.full((PROMPT,), IGNORED), prompt))
        return {"input_ids": torch.cat((prompt, prompt)), "labels": labels}


def train(accelerator: Any, *, epochs: int, samples: int, directory: Path) -> list[float]:
    """Train the adapters, save them for `PeftModel.from_pretrained`, and return the losses of all ranks' batches."""
    torch.manual_seed(42)
    shape = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=2 * PROMPT)
    shape.attn_pdrop = shape.embd_pdrop = shape.resid_pdrop = 0.0
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=True)
    model = get_peft_model(GPT2LMHeadModel(shape), lora)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)
    loader = DataLoader(Completions(samples), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        accelerator.print(f"loss {losses[-1]:.4f}")
    accelerator.unwrap_model(model).save_pretrained(
        directory, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()
    return losses


def main() -> None:
    """Train on as many ranks as the launcher has started."""
    from trainer_client import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(gradient_accumulation_steps=2, config={"zero_optimization": {"stage": 3}})
    train(accelerator, epochs=8, samples=64, directory=Path("adapters"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
