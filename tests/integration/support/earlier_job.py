"""A small job, through the store and in plain PyTorch, for tests that go on from what an earlier version has stored.

As a program it makes the archive for such a test, in a checkout of the earlier version: `python PATH/earlier_job.py
ARCHIVE.tar.gz`. So it must use nothing of this project but `initialize`, the engine's verbs and `GatheredParameters`.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import trainer_client
from trainer_client import zero

# The steps of the archive, and those after which a test ends.
STORED_STEPS, ALL_STEPS = 4, 8
# The archive has the directory of the state, or a backup of its job if the present version does not read the
# directory. It also has the losses and weights of plain PyTorch after STORED_STEPS steps.
STATE, BACKUP, REFERENCE = "state", "backup", "reference.pt"
# The name that a config without one gives the job.
JOB = "default"
_WIDTH, _CLASSES, _BATCH = 32, 16, 8


class Classifier(nn.Module):
    """A model with dropout, and with buffers that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_CLASSES, _WIDTH)
        self.inner = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.GELU(), nn.Dropout(0.25))
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embedding(ids))
        return nn.functional.cross_entropy(self.head(hidden), (ids + 1) % _CLASSES)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices with weight decay, and vectors without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Return a schedule whose rate is another one at each step."""
    return LambdaLR(optimizer, _factor)


def _factor(step: int) -> float:
    return 1.0 / (1 + step)


def config(state_dir: Path) -> dict[str, Any]:
    """Return the training config, with the keys that the versions have in common."""
    return {
        "train_micro_batch_size_per_gpu": _BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3},
        "paramserver": {
            "state_dir": str(state_dir),
            "host_budget": "96MiB",
            "nvme_budget": "128MiB",
            "placement": {"parameters": "nvme", "optimizer": "nvme"},
            "durability": "step",
        },
    }


def batch(step: int) -> torch.Tensor:
    """Return the ids of a step: int64 [8]."""
    return torch.randint(0, _CLASSES, (_BATCH,), generator=torch.Generator().manual_seed(step))


def train(engine: Any, last: int) -> None:
    """Train an engine up to the step `last`."""
    for step in range(engine.global_steps, last):
        engine.backward(engine(batch(step)))
        engine.step()


def plain() -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    """Return the model of a new job, with torch's optimizer and schedule."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, fused=True)
    return model, optimizer, schedule(optimizer)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, steps: range) -> None:
    """Train in plain PyTorch for the given steps."""
    for step in steps:
        model(batch(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of an engine's parameters by their names."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def open_engine(state_dir: Path) -> Any:
    """Return an engine of the job in a state directory, which is a new job if there is none."""
    torch.manual_seed(0)
    model = Classifier()
    return trainer_client.initialize(
        model=model, model_parameters=groups(model), config=config(state_dir), lr_scheduler=schedule
    )[0]


def make(archive: Path) -> None:
    """Train to STORED_STEPS in both ways, compare, and put both states into an archive."""
    with TemporaryDirectory() as directory:
        top = Path(directory)
        with open_engine(top / STATE) as engine:
            train(engine, STORED_STEPS)
            stored = values_of(engine)
        model, optimizer, scheduler = plain()
        train_plain(model, optimizer, scheduler, range(STORED_STEPS))
        for name, value in model.named_parameters():
            assert torch.equal(value, stored[name]), f"{name} is not what plain PyTorch has"
        reference = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(reference, top / REFERENCE)
        with tarfile.open(archive, "w:gz") as out:
            for path in (top / REFERENCE, top / STATE / "catalog.sqlite", top / STATE / "data.0"):
                out.add(path, path.relative_to(top))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
