"""Programs that import `deepspeed` run over this library: the Trainer of transformers, through Accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support.ranks import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/integration/support/trainer_script.py"

OF_THE_CONFIG = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_type": "linear",
            **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    },
}


def config(state_dir: Path, stage: int, **keys: Any) -> dict[str, Any]:
    """Return a config as the documentation of transformers recommends it: the Trainer fills in what is "auto"."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "paramserver": {"state_dir": str(state_dir), "host_budget": "64MiB", "nvme_budget": "1GiB"},
        **keys,
    }


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def train(
    directory: Path, ranks: int, ds_config: dict[str, Any] | None, *checkpoints: str
) -> list[tuple[float, float]]:
    """Run the script; with a config over this library, without one as Accelerate does it by itself."""
    directory.mkdir(exist_ok=True)
    result = directory / "losses.json"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    if ds_config is None:
        command = [*torchrun, str(SCRIPT), str(result)]
    else:
        path = directory / "config.json"
        path.write_text(json.dumps(ds_config))
        command = [*torchrun, "-m", "trainer_client.as_deepspeed", str(SCRIPT), str(result), str(path), *checkpoints]
    ended = run(*command)
    assert ended.returncode == 0, ended.stderr[-4000:]
    history: list[tuple[float, float]] = json.loads(result.read_text())
    return history


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """The losses and the norms of the gradients without this library, on two ranks."""
    return train(tmp_path_factory.mktemp("trainer") / "plain", 2, None)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("stage", "offload", "keys"),
    [
        pytest.param(*(2, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}, {}), id="stage-2"),
        pytest.param(
            *(3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, {}), id="stage-3"
        ),
        pytest.param(*(3, {}, OF_THE_CONFIG), id="stage-3-all-of-the-config"),
    ],
)
def test_the_trainer_of_transformers_trains_as_without(
    tmp_path: Path, plain: list[tuple[float, float]], stage: int, offload: dict[str, Any], keys: dict[str, Any]
) -> None:
    ds_config = config(tmp_path / "state", stage, **keys)
    ds_config["zero_optimization"] |= offload

    ours = train(tmp_path / "ours", 2, ds_config)

    assert len(ours) == len(plain)
    losses, norms = zip(*ours, strict=True)
    plain_losses, plain_norms = zip(*plain, strict=True)
    if keys:
        # DeepSpeed's schedule is one step behind the Trainer's own, so the two runs part after the first steps.
        assert losses[:2] == pytest.approx(plain_losses[:2], rel=1e-4)
        return
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert norms == pytest.approx(plain_norms, rel=1e-3)


@pytest.mark.peers
def test_the_trainer_saves_resumes_and_loads_the_best(tmp_path: Path) -> None:
    ds_config = config(tmp_path / "state", 3)
    ds_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True

    *whole, (best, after) = train(tmp_path / "run", 1, ds_config, "save")
    saved = sorted(path.name for path in (tmp_path / "run/trainer").iterdir() if path.name.startswith("checkpoint-"))
    *resumed, (best_again, after_again) = train(tmp_path / "run", 1, ds_config, "resume")

    # The Trainer itself has removed the directory of the second checkpoint.
    assert (len(whole), saved) == (6, ["checkpoint-2", "checkpoint-6"])
    assert resumed == whole
    assert best == after == best_again == after_again
    assert (tmp_path / "run/trainer/checkpoint-6/model.safetensors").exists()


def test_a_deepspeed_that_is_imported_already_is_not_replaced() -> None:
    program = (
        "import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed'); "
        "sys.modules['deepspeed'].__file__ = 'there'; import trainer_client.as_deepspeed"
    )

    ended = run("-c", program)

    assert ended.returncode == 1
    assert "deepspeed is imported already, from there" in ended.stderr


def test_submodules_are_the_same_modules_and_others_are_not_found() -> None:
    program = (
        "import trainer_client.as_deepspeed, importlib.metadata, trainer_client, deepspeed; "
        "from deepspeed.ops.adam import FusedAdam; import deepspeed.runtime.zero.partition_parameters; "
        "assert deepspeed is trainer_client and FusedAdam is trainer_client.ops.adam.FusedAdam; "
        "assert trainer_client.ops.adam.__spec__.name == 'trainer_client.ops.adam'; "
        "assert importlib.metadata.version('deepspeed') == deepspeed.__version__; "
        "import deepspeed.no_such_module"
    )

    ended = run("-c", program)

    assert "ModuleNotFoundError: No module named 'deepspeed.no_such_module'" in ended.stderr, ended.stderr


def test_a_script_gets_the_number_of_its_rank_as_from_deepspeeds_launcher(tmp_path: Path) -> None:
    script = tmp_path / "words.py"
    script.write_text("import sys; print(sys.argv[1:])")
    module = [sys.executable, "-m", "trainer_client.as_deepspeed"]

    for options, words in ((["--local_rank"], ["--local_rank=1", "--x"]), ([], ["--x"])):
        printed = subprocess.check_output(
            [*module, *options, str(script), "--x"],
            cwd=ROOT,
            env=os.environ | {"LOCAL_RANK": "1"},
            text=True,
            timeout=120,
        )
        assert printed == f"{words}\n"
