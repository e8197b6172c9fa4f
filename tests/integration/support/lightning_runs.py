"""One rank that runs the example for Lightning: `lightning_runs STORE DIRECTORY RANKS`.

STORE is the address of a daemon, or "ddp" for Lightning's own strategy. RANKS is the number of ranks, because Lightning
removes WORLD_SIZE at the end of its first fit. Rank 0 writes what each run gave to DIRECTORY/results.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

# The examples are programs and no package: they are found as Python finds the modules beside a program.
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import lightning_classifier as example
from lightning.pytorch import Trainer

import trainer_client
from trainer_client.errors import ConfigError

OFFLOAD = {"device": "cpu"}
STAGE_2: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD}}
STAGE_3: dict[str, Any] = {"zero_optimization": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}}
RUNS: dict[str, dict[str, Any]] = {
    "steps": {"max_epochs": 3},
    "accumulated": {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "epochs": {
        "max_epochs": 2,
        "interval": "epoch",
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "mixed": {"max_epochs": 2, "precision": "bf16-mixed"},
}


def make(store: str, config: dict[str, Any] = STAGE_2) -> Any:
    """Return a strategy that trains over a store, or Lightning's own."""
    if store == "ddp":
        return store
    return trainer_client.ParamserverStrategy(config=config | {"paramserver": {"address": store}})


def run(strategy: Any, directory: Path, **arguments: Any) -> tuple[Trainer, dict[str, list[float]]]:
    """Train, and return the Trainer, and what its module has noted."""
    trainer, module = example.train(strategy, directory, devices=int(sys.argv[3]), **arguments)
    return trainer, {"losses": module.losses, "rates": module.rates, "accuracies": module.accuracies}


def resumed(store: str, directory: Path) -> dict[str, Any]:
    """Train a model at stage 3 without memory, and train it again from the checkpoint after its second epoch.

    Rank 0 alone sees the directory of the checkpoint.
    """
    whole = make(store, STAGE_3)
    _, expected = run(whole, directory / "whole", max_epochs=3)
    first = make(store, STAGE_3)
    trainer, _ = run(first, directory / "parts", max_epochs=2)
    files = [path for path in Path(trainer.checkpoint_callback.last_model_path).rglob("*") if path.is_file()]
    (validated,) = trainer.validate(trainer.lightning_module, example.loaders()[1], verbose=False)
    first.close()
    path = os.path.relpath(trainer.checkpoint_callback.last_model_path)
    if os.environ["RANK"] != "0":
        # The path leads nowhere on this rank, as on a node that does not share the directory with rank 0.
        (directory / "another node").mkdir(exist_ok=True)
        os.chdir(directory / "another node")
        assert not Path(path).exists()
    second = make(store, STAGE_3)
    _, again = run(second, directory / "parts", max_epochs=3, ckpt_path=path)
    result = {
        "expected": expected["losses"][-len(again["losses"]) :],
        "again": again["losses"],
        "rates": [expected["rates"][-1], again["rates"][-1]],
        "accuracies": [expected["accuracies"][-1], again["accuracies"][-1]],
        "validated": validated["accuracy"],
        "files": {path.name: path.stat().st_size for path in files},
    }
    whole.close()
    second.close()
    return result


def refusals(store: str) -> list[str]:
    """Return the messages of errors."""
    by_hand = example.Classifier()
    by_hand.automatic_optimization = False
    messages = []
    for module, arguments in ((by_hand, {}), (example.Classifier(), {"precision": "64-true"})):
        try:
            trainer = Trainer(strategy=make(store), devices=int(sys.argv[3]), logger=False, **arguments)
            trainer.fit(module, *example.loaders())
        except ConfigError as error:
            messages.append(str(error))
    return messages


def main() -> None:
    store, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, arguments in RUNS.items():
        strategy = make(store)
        _, results[name] = run(strategy, directory / name, **arguments)
        if store != "ddp":
            strategy.close()
    if store != "ddp":
        results["resumed"] = resumed(store, directory / "resumed")
        results["refusals"] = refusals(store)
    if os.environ["RANK"] == "0":
        (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
