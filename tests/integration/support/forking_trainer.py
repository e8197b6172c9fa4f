"""A training script whose data loader forks workers, and which uses the engine in a forked child of its own.

Run as `python -m tests.integration.support.forking_trainer ADDRESS`. It prints what the child has met as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainer_client

NVME = {"device": "nvme"}
MOST_CHILDREN = 5


class Rows(Dataset[torch.Tensor]):
    """Eight equal samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


def met(action: Callable[[], object]) -> str:
    """Return the name and the text of what `action` raises; "" if it raises nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def report_of_child(actions: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Run the actions in a forked child that ends as a script does, and return what each has raised.

    gRPC may abort a child that makes calls, as docs/engine.md says, because a heartbeat of the session may be under way
    at the fork. Such a child makes no report, so another one is forked.
    """
    for _ in range(MOST_CHILDREN):
        text, code = _text_of_child(actions)
        if text or code != -signal.SIGABRT:
            break
    assert text, f"the child ended with {code} before its report"
    told: dict[str, str] = json.loads(text)
    return told | {"exit": str(code)}


def _text_of_child(actions: dict[str, Callable[[], object]]) -> tuple[str, int]:
    """Run the actions in a forked child. Return the child's report, "" if it made none, and its exit code."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps({name: met(action) for name, action in actions.items()}).encode())
        # The child runs the functions of atexit, the end of the engine among them.
        sys.exit()
    os.close(writing)
    with os.fdopen(reading) as report:
        text = report.read()
    _, status = os.wait()
    return text, os.waitstatus_to_exitcode(status)


def main(address: str) -> None:
    """Train, and print the report."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME},
        "paramserver": {"address": address},
    }
    engine, *_ = trainer_client.initialize(model=nn.Linear(2, 2), config=config)
    client = trainer_client.StoreClientSync.connect(address)
    with engine, client:
        for _ in range(2):
            loader: DataLoader[torch.Tensor] = DataLoader(
                Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"
            )
            for batch in loader:
                engine.backward(engine(batch).sum())
                engine.step()
        # gRPC aborts a child that makes calls if a thread of this process is in a call at the fork.
        engine.wait_for_commit()
        told = report_of_child(
            {
                "forward": lambda: engine(torch.ones(2, 2)),
                "step": engine.step,
                "weights": engine.full_state_dict,
                "client": client.list_jobs,
                "another client": lambda: trainer_client.StoreClientSync.connect(address).list_jobs(),
                "close": engine.close,
                "close of the client": client.close,
            }
        )
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
        engine.wait_for_commit()
        print(json.dumps(told | {"steps": engine.global_steps}))


if __name__ == "__main__":
    main(sys.argv[1])
