"""The trainer names units to the store before it uses them: in models whose order repeats, with experts, with layers
that only some steps use, with an evaluation in between, and across the end of a step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.gathers import count_gathers
from tests.integration.support.model_runs import train
from tests.integration.support.training import micro_batches
from tests.integration.support.zoo import ZOO, Block, Language
from trainer_client import Engine
from trainer_client.training.step.gather_counters import GatherCounters

BATCHES = list(micro_batches(8))
ENOUGH = 0.8


class Sometimes(Language):
    """A model with one block that is used in every third step only."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.step = 0

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != 2 or self.step % 3 == 0:
                hidden = block(hidden)
        return hidden


def start(model: nn.Module, address: str, job: str, home: str) -> Engine:
    offload = {"device": home}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "paramserver": {"address": address, "job": job, "durability": "none"},
    }
    return trainer_client.initialize(model=model, config=config)[0]


def predicted(counters: GatherCounters, unit: str | None = None) -> float:
    """Return the share of the gathers counted so far that the trainer had named to the store in advance."""
    snapshot = counters.snapshot()
    counts = snapshot.total if unit is None else snapshot.by_unit[unit]
    return counts.predicted / counts.gathers


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("name", ["gpt2-zoo", "mixtral", "partly-trained"])
def test_what_repeats_is_asked_for_before_it_is_used(model_store: str, name: str, home: str) -> None:
    torch.manual_seed(1)
    with start(ZOO[name]().train(), model_store, f"repeats-{name}-{home}", home) as engine:
        counters = count_gathers(engine)
        train(engine, BATCHES[:1])
        assert predicted(counters) < ENOUGH, "the first step teaches"
        counters.reset()
        train(engine, BATCHES[1:6])

        assert predicted(counters) > ENOUGH


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_a_unit_that_is_used_in_some_steps_only_stays_expected(model_store: str, home: str) -> None:
    model = Sometimes()
    with start(model, model_store, f"sometimes-{home}", home) as engine:
        counters = count_gathers(engine)
        for model.step, batch in enumerate(BATCHES):
            if model.step == 2:
                counters.reset()
            train(engine, [batch])

        assert predicted(counters) > ENOUGH
        assert predicted(counters, "blocks.2") == 1.0


def test_the_window_of_training_outlives_an_evaluation(model_store: str) -> None:
    torch.manual_seed(1)
    with start(ZOO["gpt2-zoo"]().train(), model_store, "evaluated", "nvme") as engine:
        counters = count_gathers(engine)
        for batch in BATCHES[:4]:
            train(engine, [batch])
            with torch.no_grad():
                engine(input_ids=batch, labels=batch)
                engine(input_ids=batch, labels=batch)
            if batch is BATCHES[0]:
                counters.reset()

        assert predicted(counters) > ENOUGH


def test_an_unchanged_window_is_not_sent_again(model_store: str) -> None:
    torch.manual_seed(1)
    for home, most in (("cpu", 0), ("nvme", 0.7)):
        with start(ZOO["gpt2-zoo"]().train(), model_store, f"messages-{home}", home) as engine:
            train(engine, BATCHES[:2])
            with patch.object(engine._store.leases, "prefetch", wraps=engine._store.leases.prefetch) as sent:
                counters = count_gathers(engine)
                train(engine, BATCHES[2:6])

            assert sent.call_count <= most * counters.snapshot().total.gathers
