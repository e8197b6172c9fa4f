"""`accelerate launch` starts ranks over this library where DeepSpeed is asked for, and an installed DeepSpeed wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.integration.support.ranks import free_port

ROOT = Path(__file__).parents[2]
# A script that does not know which `deepspeed` it gets; only its first import differs between the tests.
SCRIPT = """
import json, sys
import torch
from {library} import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(dataset, batch_size=2))
losses = []
for inputs, targets in loader:
    loss = (model(inputs) - targets).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
with open(sys.argv[1], "w") as file:
    json.dump([type(model).__module__, losses], file)
accelerator.end_training()
"""
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 1, zero3_init_flag: false}
machine_rank: 0
num_machines: 1
num_processes: 1
mixed_precision: 'no'
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which this checkout is installed as pyproject.toml says, whenever it was installed last."""
    directory = tmp_path_factory.mktemp("installed")
    metadata = directory / "checkout-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: checkout\nVersion: 1\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        line for group, names in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(directory)]),
        "OMP_NUM_THREADS": "1",
    }


def run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)


def test_the_command_and_its_ranks_take_this_library_for_deepspeed(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "config.yaml").write_text(YAML)
    ways = {
        "accelerate": ["--config_file", str(tmp_path / "config.yaml")],
        "trainer_client": ["--use_deepspeed", "--zero_stage", "2", "--num_processes", "1"],
    }
    started = []
    for library, options in ways.items():
        directory = tmp_path / library
        directory.mkdir()
        (directory / "train.py").write_text(SCRIPT.format(library=library))
        command = [str(Path(sys.executable).parent / "accelerate"), "launch", *options]
        command += ["--main_process_port", str(free_port()), "train.py", "losses.json"]
        started.append(
            subprocess.Popen(
                command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    ended = [(process.communicate(timeout=300)[0], process.returncode) for process in started]

    assert [status for _, status in ended] == [0, 0], "\n".join(output[-3000:] for output, _ in ended)
    found = [json.loads((tmp_path / library / "losses.json").read_text()) for library in ways]
    assert [module for module, _ in found] == ["trainer_client.engine.engine", "trainer_client.engine.engine"]
    assert len(found[0][1]) == 4
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def test_a_deepspeed_that_is_installed_is_the_one_that_is_imported(tmp_path: Path, environment: dict[str, str]) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("is_the_installed_one = True\n")
    paths = os.pathsep.join([environment["PYTHONPATH"], str(tmp_path)])
    program = "import torch, deepspeed; assert deepspeed.is_the_installed_one; import deepspeed.zero"

    ended = run(program, environment | {"PYTHONPATH": paths, "ACCELERATE_USE_DEEPSPEED": "true"})

    assert "ModuleNotFoundError: No module named 'deepspeed.zero'" in ended.stderr, ended.stderr


def test_other_programs_find_no_deepspeed(environment: dict[str, str]) -> None:
    program = "import importlib.util, torch; assert importlib.util.find_spec('deepspeed') is None"

    assert run(program, environment).returncode == 0
    assert "AssertionError" in run(program, environment | {"ACCELERATE_USE_DEEPSPEED": "true"}).stderr
