"""One call of `prepare` has one model and its optimizer; what cannot be trained together is refused with advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer_client.accelerate.selection import Selection
from trainer_client.errors import ConfigError


def model() -> nn.Module:
    return nn.Linear(2, 2)


def optimizer_of(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=0.1)


def test_the_model_its_optimizer_and_its_schedule_are_found_among_others() -> None:
    trained, frozen, data = model(), model().requires_grad_(False), torch.zeros(3)
    optimizer = optimizer_of(trained)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    samples = TensorDataset(torch.zeros(3))
    loaders = [DataLoader(samples, batch_size=size) for size in (4, 2)]
    objects = (loaders[0], frozen, schedule, optimizer, data, trained, loaders[1], nn.MSELoss())

    found = Selection.of(objects, has_engine=False)

    assert found is not None
    assert (found.model, found.optimizer, found.scheduler) == (trained, optimizer, schedule)
    assert (found.batch_size(1), found.batch_size(4)) == (2, 1)
    replaced = found.replaced({id(trained): "engine", id(optimizer): "optimizer"})
    assert replaced == (loaders[0], frozen, schedule, "optimizer", data, "engine", loaders[1], objects[-1])


def test_a_call_without_an_optimizer_trains_nothing() -> None:
    assert Selection.of((model(), torch.zeros(1)), has_engine=False) is None
    assert Selection.of((), has_engine=True) is None


def two_models() -> tuple[Any, ...]:
    first = model()
    return first, model(), optimizer_of(first)


def two_optimizers() -> tuple[Any, ...]:
    first = model()
    return first, optimizer_of(first), optimizer_of(first)


def others_parameters() -> tuple[Any, ...]:
    return model(), optimizer_of(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        (two_models(), "submodules of one nn.Module"),
        (two_optimizers(), "2 optimizers.*parameter group"),
        (others_parameters(), r"shape \[3, 3\]: make it from this model"),
        ((optimizer_of(model()),), "model, optimizer = accelerator.prepare"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_write(objects: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Selection.of(objects, has_engine=False)


def test_a_second_model_is_refused() -> None:
    second = model()
    with pytest.raises(ConfigError, match="free_memory"):
        Selection.of((second, optimizer_of(second)), has_engine=True)
