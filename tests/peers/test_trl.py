"""TRL's own scripts for SFT, DPO, KTO, rewards and GRPO train over this library as without it, beside references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from tests.peers import models
from tests.peers.starts import Way, command, run

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: `make peers` installs it"),
]

STEPS = 3
Rows = Iterator[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of TRL's scripts: its name, its arguments, and the columns of its data set.

    `draws_weights` says that the script draws weights after it has loaded the model. At stage 3 these are others, as
    `zero.Init` takes a seed from the same generator of torch.
    """

    script: str
    arguments: tuple[str, ...] = ()
    columns: tuple[str, ...]
    draws_weights: bool = False

    def rows(self, count: int) -> Rows:
        """Yield rows of the data set; a label alternates, and all else is words."""
        for number in range(count):
            yield {
                column: bool(number % 2) if column == "label" else models.sentence(8 * number + place)
                for place, column in enumerate(self.columns)
            }


# The completions are drawn from torch's generator, which has the same seed with and without this library. A `beta`
# has a reference model made.
DRAWN = ("--num_generations", "4", "--max_completion_length", "8", "--beta", "0.1")
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj")
CASES = {
    "SFT": Case(script="sft", columns=("text",)),
    "SFT with LoRA": Case(script="sft", columns=("text",), arguments=LORA, draws_weights=True),
    "DPO": Case(script="dpo", columns=("prompt", "chosen", "rejected")),
    "KTO": Case(script="kto", columns=("prompt", "completion", "label")),
    "reward": Case(script="reward", columns=("chosen", "rejected")),
    "GRPO": Case(script="grpo", columns=("prompt",), arguments=DRAWN),
    "RLOO": Case(script="rloo", columns=("prompt",), arguments=DRAWN),
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The policy, which is its own reference, and a model for rewards."""
    shape = Qwen2Config(
        vocab_size=models.VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    shape.num_labels = 1
    classes = {"policy": Qwen2ForCausalLM, "reward": Qwen2ForSequenceClassification}
    return {name: models.save(tmp_path_factory.mktemp(name), made, shape) for name, made in classes.items()}


def train(directory: Path, pretrained: dict[str, Path], case: Case, way: Way, *options: str) -> list[float]:
    data = models.save_data(directory / "data", {"train": case.rows(16), "test": case.rows(4)})
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    # A head that is not in the files would be drawn, and zero.Init draws other values than plain PyTorch.
    model = pretrained["reward" if case.script == "reward" else "policy"]
    rewards = ("--reward_model_name_or_path", str(pretrained["reward"])) if case.script in ("grpo", "rloo") else ()
    return run(
        directory,
        command(way, options=options),
        Path(spec.origin).parent / f"scripts/{case.script}.py",
        *("--output_dir", "output", "--model_name_or_path", str(model), "--dtype", "float32"),
        *("--dataset_name", str(data), "--report_to", "none", "--max_steps", str(STEPS), "--learning_rate", "1e-2"),
        *("--per_device_train_batch_size", "4", "--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false"),
        *rewards,
        *case.arguments,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, pretrained: dict[str, Path]) -> Callable[[str], list[float]]:
    """Return what gives the losses of a script without this library; it runs once for both stages."""
    return cache(lambda name: train(tmp_path_factory.mktemp("plain"), pretrained, CASES[name], Way.PLAIN))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_without(
    tmp_path: Path, pretrained: dict[str, Path], plain: Callable[[str], list[float]], name: str, stage: int
) -> None:
    ours = train(tmp_path, pretrained, CASES[name], Way.ACCELERATE, "--zero_stage", str(stage))

    assert len(ours) >= STEPS
    if CASES[name].draws_weights and stage == 3:
        # An adapter adds nothing before its first step.
        assert ours[0] == pytest.approx(plain(name)[0], rel=1e-4)
        assert ours[-1] < ours[0]
    else:
        assert ours == pytest.approx(plain(name), rel=1e-4, abs=1e-6)
