"""The gpu tier on an accelerator: what stays there changes no bit, and is not copied there again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainer_client
from tests.gpu.accelerator import NEEDS_ACCELERATOR, kind
from tests.integration.support.training import (
    Run,
    assert_bit_equal,
    build_model,
    make_optimizer,
    micro_batches,
    store_config,
    train_through_store,
)

pytestmark = [*NEEDS_ACCELERATOR, pytest.mark.usefixtures("deterministic")]

MODELS: dict[str, dict[str, Any]] = {"gpt2": {"accumulation": 3}, "adapters": {}, "conditional": {}}
# "part" has no room for all parameters of a model, "all" has.
BUDGETS = {"part": 48 << 10, "all": 1 << 24}


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("model", MODELS)
def test_copies_that_stay_change_no_bit(model: str, home: str, tmp_path: Path) -> None:
    def train(name: str, **section: Any) -> Any:
        config = store_config(tmp_path / name, home, **section)
        return train_through_store(Run(model=model, steps=3, device=kind(), config=config, **MODELS[model]))

    expected = train("none")
    for name, budget in BUDGETS.items():
        assert_bit_equal(train(name, gpu_budget=budget), expected)


def test_a_micro_batch_after_the_first_reads_nothing_from_the_store(tmp_path: Path) -> None:
    config = store_config(tmp_path, "cpu", gpu_budget=BUDGETS["all"])
    run = Run(steps=3, accumulation=4, device=kind(), config=config | {"gradient_accumulation_steps": 4})
    model = build_model(run)
    optimizer, _ = make_optimizer(model, run)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with trainer_client.initialize(model=model, optimizer=optimizer, config=run.config)[0] as engine:
        for tokens in micro_batches(run.steps * run.accumulation):
            batch = tokens.to(engine.device)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        report = engine.step_report()
    assert report is not None
    # Each parameter is read once in a step. Without the tier it would be eight times.
    assert report.to_dict()["bytes"]["store_to_trainer"] <= 1.5 * nbytes
