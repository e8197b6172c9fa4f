"""A classifier trained by Lightning: only the Trainer's `strategy` differs from a script of Lightning.

    python examples/lightning_classifier.py
    torchrun --nproc-per-node 2 examples/lightning_classifier.py

A point on a plane is of the class of the quadrant, of four, in which it lies.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Classifier(LightningModule):
    """Two layers, AdamW and a schedule that steps once a batch; or once an epoch."""

    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        self.interval = interval
        self.net: nn.Sequential | None = None
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.accuracies: list[float] = []

    def configure_model(self) -> None:
        """Make the layers, which have no memory on any rank at stage 3."""
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, 4] of points [batch, 2]."""
        assert self.net is not None
        logits: torch.Tensor = self.net(points)
        return logits

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean loss over the batch."""
        points, classes = batch
        loss = functional.cross_entropy(self(points), classes)
        self.losses.append(float(loss.detach()))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Log the mean accuracy over all ranks."""
        points, classes = batch
        right = (self(points).argmax(dim=1) == classes).float().mean()
        self.log("accuracy", right, sync_dist=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        """Keep the accuracy of this validation."""
        self.accuracies.append(float(self.trainer.callback_metrics["accuracy"]))

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the schedule with its interval."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)
        gamma = 0.98 if self.interval == "step" else 0.5
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


def loaders(samples: int = 128) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders for training and for validation."""
    points = torch.rand(samples + 40, 2, generator=torch.Generator().manual_seed(3)) * 2 - 1
    classes = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    parts = (slice(0, samples), slice(samples, None))
    train, validation = (TensorDataset(points[part], classes[part]) for part in parts)
    return DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(validation, batch_size=BATCH)


def train(
    strategy: Any, directory: Path, *, interval: str = "step", ckpt_path: str | None = None, **arguments: Any
) -> tuple[Trainer, Classifier]:
    """Train, and return the Trainer and its module.

    Args:
        directory: the directory of the checkpoints.
        interval: "step" or "epoch": when the schedule steps.
        ckpt_path: a checkpoint to go on from.
        arguments: further arguments of the Trainer.
    """
    seed_everything(11, verbose=False)
    trainer = Trainer(
        strategy=strategy,
        default_root_dir=directory,
        callbacks=[ModelCheckpoint(directory / "checkpoints", monitor="accuracy", mode="max", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": int(os.environ.get("WORLD_SIZE", "1")), **arguments},
    )
    module = Classifier(interval)
    trainer.fit(module, *loaders(), ckpt_path=ckpt_path)
    return trainer, module


def main() -> None:
    """Train on as many ranks as the launcher has started."""
    from trainer_client import ParamserverStrategy  # noqa: PLC0415

    offload = {"device": "cpu"}
    strategy = ParamserverStrategy(
        config={"zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload}}
    )
    trainer, module = train(strategy, Path("lightning"), max_epochs=6, gradient_clip_val=1.0)
    if trainer.is_global_zero:
        print(f"loss {module.losses[-1]:.4f}, accuracy {module.accuracies[-1]:.3f}")
    strategy.close()


if __name__ == "__main__":
    main()
