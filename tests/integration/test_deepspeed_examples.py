"""The examples that are scripts for DeepSpeed run unmodified over this library, and compute what DeepSpeed computes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.training.deepspeed_environment import interpreter, is_installed
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import free_port, run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WORLD_SIZE = 2
END_SECONDS = 500.0
POLL_SECONDS = 0.02

LINEAR = ["deepspeed_linear.py"]
CIFAR_CONFIG = EXAMPLES / "deepspeed_cifar.json"
CIFAR = ["deepspeed_cifar.py", "--deepspeed", "--samples", "256"]
FINETUNE = ["deepspeed_finetune.py", "--save_interval", "4", "--output_dir", "saved"]
MULTITASK = ["deepspeed_multitask.py"]

# DeepSpeed's Adam computes torch's formula in another order, and the ranks' gradients are summed in another order. In
# fp32 the losses of these steps differ in the sixth or seventh digit then.
FP32 = 2e-5
# A weight in bf16 has 8 bits, and a difference in the last bit of its fp32 master may round it the other way, by 0.4 %.
BF16 = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """How scripts are started over a library: the interpreter, what stands before the script, and variables."""

    python: Path
    prefix: Sequence[str]
    variables: Mapping[str, str]

    def start(self, directory: Path, script: Sequence[str], losses: str) -> subprocess.Popen[bytes]:
        """Start two ranks under torchrun in `directory`, where rank 0 writes `losses`, and all write the file log."""
        directory.mkdir(exist_ok=True)
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}", f"--master-port={free_port()}"]
        name, *arguments = script
        command = [*torchrun, *self.prefix, str(EXAMPLES / name), *arguments, "--loss_file", losses]
        with (directory / "log").open("a") as log:
            return subprocess.Popen(
                [self.python, *command],
                cwd=directory,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(self.variables),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, directory: Path, script: Sequence[str], losses: str = "losses.json") -> str:
        """Run two ranks until they end, and return what rank 0 has written to the file `losses`."""
        with self.start(directory, script, losses) as ranks:
            ranks.wait(END_SECONDS)
        assert ranks.returncode == 0, (directory / "log").read_text()[-6000:]
        return (directory / losses).read_text()


OURS = Library(
    python=Path(sys.executable), prefix=["-m", "trainer_client.as_deepspeed"], variables={"PYTHONPATH": str(ROOT)}
)


@pytest.fixture(scope="module")
def original(request: pytest.FixtureRequest) -> Library:
    """DeepSpeed itself."""
    directory: Path = request.config.getoption("--deepspeed")
    if not is_installed(directory):
        pytest.skip(f"DeepSpeed is not installed in {directory}: `make peers` sets it up")
    python, variables = interpreter(directory)
    return Library(python=python, prefix=[], variables=variables)


def flat(value: Any) -> list[float]:
    """Return the numbers of nested lists."""
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]


def by_step(text: str) -> dict[int, dict[str, float]]:
    """Return the lines that the fine-tuning has written for its steps; a line that is not whole is left out."""
    whole, _, _ = text.rpartition("\n")
    return {line["step"]: line for line in map(json.loads, whole.splitlines())}


@pytest.mark.peers
@pytest.mark.parametrize(
    ("script", "tolerance"),
    [
        pytest.param([*LINEAR, "--steps", "30"], FP32, id="linear"),
        # From the second epoch on, roundings in bf16 grow from step to step: after 14 steps losses differ by 1.2 %.
        pytest.param([*CIFAR, "--epochs", "1", "--deepspeed_config", str(CIFAR_CONFIG)], BF16, id="cifar, bf16"),
        pytest.param([*CIFAR, "--epochs", "2", "--deepspeed_config", "fp32.json"], FP32, id="cifar, fp32"),
        pytest.param([*MULTITASK, "--steps", "20"], FP32, id="multitask"),
    ],
)
def test_two_ranks_have_the_losses_of_deepspeed(
    tmp_path: Path, original: Library, script: list[str], tolerance: float
) -> None:
    for library in ("deepspeed", "ours"):
        (tmp_path / library).mkdir()
        config = json.loads(CIFAR_CONFIG.read_text()) | {"bf16": {"enabled": False}}
        (tmp_path / library / "fp32.json").write_text(json.dumps(config))
    expected = json.loads(original.run(tmp_path / "deepspeed", script))
    ours = json.loads(OURS.run(tmp_path / "ours", script))

    assert ours.keys() == expected.keys()
    # After a few steps classes are nearly equally likely, so that roundings in bf16 decide which one is predicted.
    for name in ours.keys() - ({"accuracy"} if tolerance == BF16 else set()):
        bound = 1e-9 if name == "rates" else tolerance
        assert flat(ours[name]) == pytest.approx(flat(expected[name]), rel=bound), name


def kill_and_resume(library: Library, directory: Path, script: list[str]) -> list[dict[int, dict[str, float]]]:
    """Kill a rank after the sixth step, and start the script again. Return the lines of both starts, by step."""
    with library.start(directory, [*script, "--steps", "1000"], "first") as ranks:
        written = directory / "first"
        while not written.exists() or len(by_step(written.read_text())) < 6:
            assert ranks.poll() is None, (directory / "log").read_text()[-6000:]
            time.sleep(POLL_SECONDS)
        psutil.Process(ranks.pid).children()[-1].kill()
        assert ranks.wait(END_SECONDS) != 0
    saved = int((directory / "saved/latest").read_text().removeprefix("global_step"))
    again = library.run(directory, [*script, "--resume", "--steps", str(saved + 4)], "again")
    return [by_step(written.read_text()), by_step(again)]


@pytest.mark.peers
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", FP32), ("bf16", BF16)])
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_as_with_deepspeed(
    tmp_path: Path, original: Library, dtype: str, tolerance: float
) -> None:
    script = [*FINETUNE, "--dtype", dtype]
    expected = kill_and_resume(original, tmp_path / "deepspeed", script)
    ours = kill_and_resume(OURS, tmp_path / "ours", script)

    for mine, theirs in zip(ours, expected, strict=True):
        common = sorted(mine.keys() & theirs.keys())
        assert len(common) >= 4
        for key, bound in {"loss": tolerance, "norm": 10 * tolerance, "rate": 1e-9}.items():
            assert [mine[step][key] for step in common] == pytest.approx(
                [theirs[step][key] for step in common], rel=bound
            ), key
    first, again = ours
    assert min(again) % 4 == 1 and min(again) > 4
    assert all(again[step] == first[step] for step in first.keys() & again.keys())


# Without DeepSpeed


@pytest.fixture
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A forked daemon for the script, because one that the script starts takes seconds to import its modules."""
    with Daemon(tmp_path / "state") as daemon:
        monkeypatch.setenv("PARAMSERVER_ADDRESS", daemon.address)
        yield


def run_example(directory: Path, script: Sequence[str], losses: str = "losses.json") -> str:
    """Run a script over this library, on one rank that is forked and so begins at once. Return its file of losses."""
    name, *arguments = script
    arguments += ["--loss_file", losses]
    run_ranks("tests.integration.support.as_deepspeed", 1, directory, EXAMPLES / name, *arguments)
    return (directory / losses).read_text()


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param([*LINEAR, "--steps", "10"], id="linear"),
        pytest.param([*CIFAR, "--epochs", "1", "--deepspeed_config", str(CIFAR_CONFIG)], id="cifar"),
        pytest.param([*MULTITASK, "--steps", "10"], id="multitask"),
    ],
)
def test_an_example_trains(tmp_path: Path, script: list[str]) -> None:
    result = json.loads(run_example(tmp_path, script))

    losses = [sum(flat(loss)) for loss in result["losses"]]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    if "saved" in result:
        # The plain model with the saved weights, on a part of the data of the evaluation.
        assert result["saved"] == pytest.approx(result["evaluations"][-1], rel=0.2)


@pytest.mark.usefixtures("_store")
def test_a_second_start_has_the_losses_that_followed_the_checkpoint(tmp_path: Path) -> None:
    first = by_step(run_example(tmp_path, [*FINETUNE, "--steps", "6"], "first"))
    again = by_step(run_example(tmp_path, [*FINETUNE, "--steps", "6", "--resume"], "again"))

    assert sorted(first) == [1, 2, 3, 4, 5, 6]
    assert again == {step: first[step] for step in (5, 6)}
