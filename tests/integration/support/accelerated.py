"""One rank that runs the examples for Accelerate: `accelerated LIBRARY DIRECTORY`.

LIBRARY is "accelerate" for the original (DDP), or "store" for this library. Rank 0 writes what each example returned to
DIRECTORY/results.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn import functional

import trainer_client

# The examples are programs and no package: they are found as Python finds the modules beside a program.
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import accelerate_lora
import accelerate_nlp
import accelerate_vision

# The store's config for each example: among them are two stages and both offloads.
OFFLOAD = {"device": "cpu"}
CONFIGS: dict[str, dict[str, Any]] = {
    "smallest": {},
    "nlp": {"zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD}},
    "vision": {},
    "lora": {"zero_optimization": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}},
}


def make(library: str, example: str, directory: Path, **arguments: Any) -> Any:
    """Return a new Accelerator, as a script would make it. Its predecessor in this process is forgotten."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if library == "accelerate":
        return accelerate.Accelerator(cpu=True, **arguments)
    (directory / example).mkdir(exist_ok=True)
    store = {"state_dir": str(directory / example / "state"), "host_budget": "64MiB", "nvme_budget": "1GiB"}
    return trainer_client.Accelerator(config=CONFIGS[example] | {"paramserver": store}, **arguments)


def smallest(accelerator: Any, directory: Path) -> list[float]:
    """Train a linear model on plain tensors, as Accelerate's shortest example does, and go back three steps once."""
    torch.manual_seed(5)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    own = torch.Generator().manual_seed(accelerator.process_index)
    data, labels = torch.randn(8, 6, generator=own), torch.randint(3, (8,), generator=own)
    prepared = accelerator.prepare(model, optimizer, data, labels)
    schedule = accelerator.prepare(schedule)
    assert prepared[2] is data and prepared[3] is labels
    model, optimizer, data, labels = prepared
    losses = []
    for step in range(9):
        if step == 3:
            accelerator.save_state(str(directory))
        if step == 6:
            accelerator.load_state(str(directory))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), labels)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    assert losses[6:] == losses[3:6]
    losses.append(schedule.get_last_lr()[0])
    return losses


def main() -> None:
    library, directory = sys.argv[1], Path(sys.argv[2])
    os.environ["OMP_NUM_THREADS"] = "1"
    results: dict[str, Any] = {}
    accelerator = make(library, "smallest", directory)
    results["smallest"] = smallest(accelerator, directory / "saved")
    accelerator.free_memory()

    accelerator = make(library, "nlp", directory, gradient_accumulation_steps=2)
    results["nlp"], results["accuracy"] = accelerate_nlp.train(accelerator, epochs=2, samples=56)
    accelerator.free_memory()

    accelerator = make(library, "vision", directory, mixed_precision="bf16")
    results["vision"], results["norms"] = accelerate_vision.train(
        accelerator, epochs=1, samples=64, directory=directory / "trained"
    )
    accelerator.free_memory()

    accelerator = make(library, "lora", directory, gradient_accumulation_steps=2)
    results["lora"] = accelerate_lora.train(accelerator, epochs=2, samples=32, directory=directory / "adapters")
    if accelerator.is_main_process:
        (directory / "results.json").write_text(json.dumps(results))
    accelerator.end_training()
