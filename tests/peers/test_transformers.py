"""The Trainer of transformers tunes pretrained models over this library as without it, whatever starts its script."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tests.peers import models
from tests.peers.starts import OURS, ROOT, Way, command, config, run, write_json

pytestmark = pytest.mark.peers

TUNING = ROOT / "tests/peers/tuning.py"
# The words of the script for each case.
CASES = {"resized": [], "LoRA": ["--lora"]}
# The last of the six steps goes on from the checkpoint of the fourth one.
KILLED_BEFORE = 6
CHECKPOINT = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=None, eos_token_id=None,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return models.save(tmp_path_factory.mktemp("model"), GPT2LMHeadModel, shape)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, list[float]]:
    """The losses of each case without this library."""
    before = command(Way.PLAIN)
    return {
        case: run(tmp_path_factory.mktemp("plain"), before, TUNING, str(model), "output", *words)
        for case, words in CASES.items()
    }


def start(directory: Path, way: Way, stage: int, model: Path, *words: str, killed: bool = False) -> list[float]:
    path = write_json(directory / "config.json", config(zero_optimization={"stage": stage}))
    options: list[str] = []
    match way:
        case Way.ACCELERATE:
            options = ["--deepspeed_config_file", str(path), "--zero3_init_flag", "true"]
        case Way.LAUNCH:
            # The script takes no argument --local_rank.
            options = ["--no_local_rank"]
    named = [] if way is Way.ACCELERATE else ["--deepspeed", str(path)]
    before = command(way, options=options)
    return run(directory, before, TUNING, str(model), "output", *named, *words, killed=killed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("way", "stage"), [(Way.PYTHON, 2), *((way, 3) for way in OURS)])
def test_the_losses_are_those_without(
    tmp_path: Path, model: Path, plain: dict[str, list[float]], way: Way, stage: int, case: str
) -> None:
    assert start(tmp_path, way, stage, model, *CASES[case]) == pytest.approx(plain[case], rel=1e-5)


@pytest.mark.parametrize("way", OURS)
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(
    tmp_path: Path, model: Path, plain: dict[str, list[float]], way: Way
) -> None:
    expected = plain["resized"]

    first = start(tmp_path, way, 3, model, "--killed-before", str(KILLED_BEFORE), killed=True)
    both = start(tmp_path, way, 3, model, "--resume")

    assert first == pytest.approx(expected[: KILLED_BEFORE - 1], rel=1e-5)
    assert both[len(first) :] == pytest.approx(expected[CHECKPOINT:], rel=1e-5)
