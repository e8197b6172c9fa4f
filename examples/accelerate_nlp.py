"""Sentence classification with Accelerate's loop: only the import of `Accelerator` differs from a script of Accelerate.

    python examples/accelerate_nlp.py
    torchrun --nproc-per-node 2 examples/accelerate_nlp.py

The model is a small BERT, made from its config. A sentence is of class 1 if it has more high tokens than low ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

VOCABULARY = 16
LENGTH = 12


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random sentences, which depend on their number only."""

    def __init__(self, size: int, first: int) -> None:
        self._size = size
        self._first = first

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self._size:
            raise IndexError(index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(self._first + index))
        return {"input_ids": tokens, "labels": (tokens.float().mean() > (VOCABULARY - 1) / 2).long()}


def train(accelerator: Any, *, epochs: int, samples: int) -> tuple[list[float], float]:
    """Train, and return the loss of each batch of all ranks, and the accuracy on other sentences."""
    torch.manual_seed(42)
    shape = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(Sentences(samples, 0), batch_size=8, shuffle=True)
    # The number of the last sentences is odd, so that ranks repeat one of them, which gather_for_metrics leaves out.
    others = DataLoader(Sentences(37, samples), batch_size=8)
    schedule = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=4,
        num_training_steps=epochs * len(loader) // accelerator.gradient_accumulation_steps,
    )
    model, optimizer, loader, others, schedule = accelerator.prepare(model, optimizer, loader, others, schedule)

    losses = []
    for _ in range(epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        accelerator.print(f"loss {losses[-1]:.4f}, learning rate {schedule.get_last_lr()[0]:.6f}")

    model.eval()
    correct = []
    for batch in others:
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        correct += (predicted == labels).tolist()
    return losses, sum(correct) / len(correct)


def main() -> None:
    """Train on as many ranks as the launcher has started."""
    from trainer_client import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(gradient_accumulation_steps=2)
    _, accuracy = train(accelerator, epochs=6, samples=512)
    accelerator.print(f"accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
