"""A script for DeepSpeed runs with one import changed, under torchrun, and computes what plain PyTorch computes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.support.deepspeed_script import RATE, STEPS, batch, build
from tests.integration.support.ranks import free_port

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 2


def run(directory: Path, *command: str) -> str:
    """Run Python with a command in a directory, with this checkout's packages. Return what it has printed."""
    # The launcher warns if each of its ranks may use all cores, so the environment says how many threads each has.
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain() -> tuple[list[float], torch.Tensor]:
    """Return the sums of the ranks' losses and the last weight of the same training in plain PyTorch."""
    model = build()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), RATE, weight_decay=0, fused=True)
    sums = []
    for step in range(STEPS):
        losses = torch.stack([model(batch(step, rank)).square().mean() for rank in range(WORLD_SIZE)])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sums.append(float(losses.detach().sum()))
    return sums, model.get_parameter("2.weight").detach()


def test_two_ranks_of_torchrun_train_as_plain_pytorch(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}", f"--master-port={free_port()}"]

    printed = run(tmp_path, *launch, "-m", "tests.integration.support.deepspeed_script", "--deepspeed")

    (line,) = [line for line in printed.splitlines() if line.startswith('{"losses"')]
    result = json.loads(line)
    losses, weight = plain()
    assert result["losses"] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(torch.tensor(result["weight"]), weight.flatten(), rtol=1e-5, atol=1e-7)


def test_the_script_of_the_page_runs_on_one_rank(tmp_path: Path) -> None:
    page = (ROOT / "docs/deepspeed.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    path = tmp_path / "script.py"
    path.write_text(script)

    run(tmp_path, str(path))
    assert (tmp_path / "paramserver-state").is_dir()


def test_ranks_that_leave_their_process_group_first_end_quietly(tmp_path: Path) -> None:
    """torch recommends that a script leaves its group at its end, and many never close their engine."""
    (tmp_path / "left.py").write_text(
        "import torch, trainer_client\n"
        "trainer_client.init_distributed()\n"
        "config = {\n"
        "    'train_micro_batch_size_per_gpu': 1, 'gradient_clipping': 1.0, 'zero_optimization': {'stage': 3},\n"
        "    'optimizer': {'type': 'AdamW', 'params': {'lr': 0.1}},\n"
        "    'paramserver': {'host_budget': '64MiB', 'nvme_budget': '256MiB'},\n"
        "}\n"
        "engine = trainer_client.initialize(model=torch.nn.Linear(2, 2), config=config)[0]\n"
        "engine.backward(engine(torch.ones(1, 2)).sum())\n"
        "engine.step()\n"
        "torch.distributed.destroy_process_group()\n"
    )
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}", f"--master-port={free_port()}"]

    done = subprocess.run(
        [sys.executable, *launch, "left.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    # The one line that a new job has.
    assert [line for line in done.stderr.splitlines() if "new job 'default'" not in line] == []
