"""A training script as a beginner writes it: the default config, and no logging.

Run as `python -m tests.integration.support.two_models WIDTH STEPS [CONFIG AS JSON]`. The model has one hidden layer of
WIDTH; STEPS are trained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainer_client
from tests.integration.support.forked import ROOT


def train(width: str, steps: str, changes: str = "{}") -> int:
    """Train, and return the number of the last step. `changes` of the config are JSON."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, int(width)), torch.nn.Linear(int(width), 1))
    optimizer = {"type": "AdamW", "params": {"lr": 0.001}}
    config = {"train_batch_size": 2, "optimizer": optimizer, "gradient_clipping": 0.0} | json.loads(changes)
    engine, *_ = trainer_client.initialize(model=model, config=config)
    with engine:
        for _ in range(int(steps)):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
    return engine.global_steps


def train_here(monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str) -> int:
    """Train in a directory, in this process, which is much quicker than the script."""
    monkeypatch.chdir(directory)
    return train(*arguments)


def stderr_of_script(directory: Path, *arguments: str, exit_code: int = 0) -> str:
    """Run the script in a directory, as a user does, and return what it prints to stderr."""
    ended = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == exit_code, ended.stderr
    return ended.stderr


if __name__ == "__main__":
    train(*sys.argv[1:])
