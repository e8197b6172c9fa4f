"""Accelerate's examples by feature run as they stand over this library, with the losses that they have without it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from tests.peers import models
from tests.peers.starts import Way, command, run

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("evaluate") is None, reason="evaluate is not installed: `make peers` installs it"),
]

# The metric that the examples ask the hub for, as `evaluate.load` finds one in a directory.
METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(p == r for p, r in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references), "f1": right / len(references)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One example: its script, and the arguments of each of its starts, one after another in the same directory.

    `plain_variables` are environment variables of the runs without this library, and `options` are those of the
    launcher. With `shuffles_by_weights`, the run at stage 3 has to end, and its losses are not compared.
    """

    script: str
    starts: Sequence[Sequence[str]] = ((),)
    plain_variables: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    shuffles_by_weights: bool = False


# These examples are not for DeepSpeed: ddp_comm_hook (DDP), fsdp_with_peak_mem_tracking (FSDP), local_sgd (Accelerate
# refuses it), megatron_lm_gpt_pretraining (Megatron), schedule_free (an optimizer that DeepSpeed does not know).
CASES = {
    "accumulation": Case(script="gradient_accumulation.py", starts=[["--gradient_accumulation_steps", "2"]]),
    "automatic accumulation": Case(script="automatic_gradient_accumulation.py"),
    # This example counts its micro-batches itself, so with DeepSpeed, Accelerate steps after each of them. The launcher
    # clips at 1.0, as the example does.
    "accumulation of tokens": Case(
        script="gradient_accumulation_for_autoregressive_models.py",
        starts=[["--gradient_accumulation_steps", "2"]],
        plain_variables={"STEP_AFTER_EACH_BACKWARD_CLIPPED_TO": "1.0"},
    ),
    "checkpoints": Case(
        script="checkpointing.py",
        starts=[["--checkpointing_steps", "epoch"], ["--resume_from_checkpoint", "epoch_0"]],
    ),
    "early stopping": Case(script="early_stopping.py"),
    "memory": Case(script="memory.py"),
    "metrics": Case(script="multi_process_metrics.py"),
    "profiler": Case(script="profiler.py"),
    "tracking": Case(script="tracking.py", starts=[["--with_tracking", "--project_dir", "logs"]]),
    # This example imports names that Accelerate has only with DeepSpeed, and saves the whole weights at its end. At
    # stage 3, transformers draws weights before it loads them, so the example then shuffles its texts in another order.
    "config": Case(
        script="deepspeed_with_config_support.py",
        plain_variables={"HAS_DUMMIES": "1"},
        options=["--zero3_save_16bit_model", "true"],
        shuffles_by_weights=True,
        starts=[
            shlex.split(
                "--model_name_or_path HuggingFaceTB/SmolLM-360M --train_file texts.json --validation_file texts.json "
                "--block_size 16 --num_train_epochs 2 --seed 5 --output_dir output"
            )
        ],
    ),
}


def prepare(directory: Path) -> None:
    """Make what the examples ask the hub for, in directories of the same names."""
    bert = BertConfig(
        vocab_size=models.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    llama = LlamaConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    models.save(directory / "bert-base-cased", BertForSequenceClassification, bert)
    models.save(directory / "HuggingFaceTB/SmolLM-360M", LlamaForCausalLM, llama)

    def pairs(count: int) -> list[Mapping[str, Any]]:
        return [
            {"sentence1": models.sentence(n), "sentence2": models.sentence(n + 1), "label": n % 2, "idx": n}
            for n in range(count)
        ]

    texts = [{"text": models.sentence(number, 12)} for number in range(24)]
    # An example takes 500 rows, and leaves the empty ones out.
    rows = texts + [{"text": ""}] * (500 - len(texts))
    models.save_data(
        directory / "nyu-mll/glue", {"train": pairs(48), "validation": pairs(16), "test": pairs(16)}, name="mrpc"
    )
    models.save_data(directory / "Salesforce/wikitext", {"train": rows, "validation": texts}, name="wikitext-2-v1")
    (directory / "texts.json").write_text((directory / "Salesforce/wikitext/validation.jsonl").read_text())
    (directory / "glue").mkdir()
    (directory / "glue/glue.py").write_text(METRIC)


Train = Callable[[Path, Way, Sequence[str], str], list[float]]


@pytest.fixture(scope="module")
def train(accelerate_checkout: Path) -> Train:
    """Return what runs an example in a directory, with all of its starts, and returns the losses of all."""

    def run_all(directory: Path, way: Way, options: Sequence[str], name: str) -> list[float]:
        prepare(directory)
        script = accelerate_checkout / "examples/by_feature" / CASES[name].script
        losses: list[float] = []
        for words in CASES[name].starts:
            variables = CASES[name].plain_variables if way is Way.PLAIN else {}
            losses = run(directory, command(way, options=options), script, *words, variables=variables)
        return losses

    return run_all


@pytest.fixture(scope="module")
def plain(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Return what gives the losses of an example without this library; it runs once for both stages."""
    return cache(lambda name: train(tmp_path_factory.mktemp("plain"), Way.PLAIN, (), name))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_without(
    tmp_path: Path, train: Train, plain: Callable[[str], list[float]], name: str, stage: int
) -> None:
    options = ["--zero_stage", str(stage), "--zero3_init_flag", str(stage == 3).lower(), *CASES[name].options]
    # The micro-batches of a step are those of the launcher, which Accelerate's plug-in for DeepSpeed reads.
    if "--gradient_accumulation_steps" in (words := CASES[name].starts[0]):
        options += words

    losses = train(tmp_path, Way.ACCELERATE, options, name)
    if stage == 3 and CASES[name].shuffles_by_weights:
        assert len(losses) == len(plain(name))
    else:
        assert losses == pytest.approx(plain(name), rel=1e-4)
