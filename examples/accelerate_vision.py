"""Image classification with Accelerate's loop: mixed precision, clipping, a one-cycle schedule and the saved model.

    python examples/accelerate_vision.py
    torchrun --nproc-per-node 2 examples/accelerate_vision.py

The model is a small ResNet, made from its config. The class of an image is the quarter that is brightest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

CLASSES = 4
SIZE = 16


def images(count: int) -> TensorDataset:
    """Return images [count, 3, SIZE, SIZE] and their classes [count]."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    half = SIZE // 2
    for image, label in zip(pixels, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 1.0
    return TensorDataset(pixels, labels)


def train(accelerator: Any, *, epochs: int, samples: int, directory: Path) -> tuple[list[float], list[float]]:
    """Train, save the weights, and return the losses of all ranks' batches, and the norms of the gradients."""
    torch.manual_seed(42)
    shape = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_channels=3)
    shape.num_labels = CLASSES
    model = ResNetForImageClassification(shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(images(samples), batch_size=8, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=epochs, steps_per_epoch=len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses, norms = [], []
    for _ in range(epochs):
        model.train()
        for pixels, labels in loader:
            loss = functional.cross_entropy(model(pixels).logits, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        accelerator.print(f"loss {losses[-1]:.4f}")
    accelerator.save_model(model, str(directory))
    return losses, norms


def main() -> None:
    """Train on as many ranks as the launcher has started."""
    from trainer_client import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(mixed_precision="bf16")
    train(accelerator, epochs=5, samples=128, directory=Path("trained"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
