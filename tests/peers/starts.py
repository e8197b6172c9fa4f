"""How scripts of other projects are started, over this library and without it, and which losses they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.integration.support.ranks import free_port

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests/peers/recording.py"
END_SECONDS = 900.0

# A script gets these from its launcher, and no launcher of these tests may pass on those of another one.
_NUMBERED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OFFLINE = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}


class Way(StrEnum):
    """What starts a script."""

    PLAIN = "without this library"
    PYTHON = "python"
    LAUNCH = "paramserver launch"
    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate launch"


# The ways over this library.
OURS = [way for way in Way if way is not Way.PLAIN]


def command(way: Way, *, options: Sequence[str] = ()) -> list[str]:
    """Return what stands before the script. `options` are those of the launcher."""
    module = [sys.executable, "-m"]
    port = str(free_port())
    match way:
        case Way.PLAIN:
            return [sys.executable]
        case Way.PYTHON:
            return [*module, "trainer_client.as_deepspeed"]
        case Way.LAUNCH:
            return [*module, "paramserver", "launch", "--as-deepspeed", "--num_gpus", "1", *options]
        case Way.TORCHRUN:
            torchrun = [*module, "torch.distributed.run", "--nproc-per-node", "1", "--master-port", port]
            return [*torchrun, "-m", "trainer_client.as_deepspeed"]
        case Way.ACCELERATE:
            accelerate = [*module, "accelerate.commands.accelerate_cli", "launch", "--use_deepspeed"]
            return [*accelerate, "--num_processes", "1", "--main_process_port", port, *options]


def run(
    directory: Path,
    before: Sequence[str],
    script: Path,
    *arguments: str,
    paths: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
    killed: bool = False,
) -> list[float]:
    """Run a script in `directory` until it ends, and return the losses that it has taken backward there so far.

    Args:
        directory: the working directory; the state directory of the script's daemon is made there, too.
        before: what stands before the script: `command(...)`.
        script: the script.
        arguments: its arguments.
        paths: directories that its modules are found in.
        variables: environment variables.
        killed: whether the script ends itself by a signal. All others end with 0.
    """
    losses = directory / "losses.txt"
    environment = {name: value for name, value in os.environ.items() if name not in _NUMBERED} | _OFFLINE
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, ROOT]))
    environment["HF_HOME"] = str(directory / "huggingface")
    with (directory / "log").open("ab") as log:
        ended = subprocess.run(
            [*before, str(RECORDING), str(losses), str(script), *arguments],
            cwd=directory,
            env=environment | dict(variables or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=END_SECONDS,
            check=False,
        )
    assert (ended.returncode != 0) == killed, (directory / "log").read_text(errors="replace")[-6000:]
    return [float(line) for line in losses.read_text().split()]


def config(**sections: Any) -> dict[str, Any]:
    """Return a config for a store of this size, as the documentation of transformers recommends it."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "paramserver": {"host_budget": "64MiB", "nvme_budget": "1GiB"},
        **sections,
    }


def write_json(path: Path, value: Any) -> Path:
    """Write a JSON file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path
