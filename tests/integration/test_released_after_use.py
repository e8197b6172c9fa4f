"""What a pass does not need any more is freed at once: units, and the graphs of forwards without a backward."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import trainer_client
from tests.integration.support.gathered_units import counting_gathered
from tests.integration.support.training import store_config
from tests.integration.support.unlike_experts import BLOCKS, EXPERTS, WIDTH, Mixture


class Deep(nn.Module):
    """Blocks of one input or of two. Their outputs can be asked for whether they are still in memory."""

    def __init__(self, inputs: int) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.inputs = inputs
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Sum() for _ in range(BLOCKS))
        self.outputs: list[StorageWeakRef] = []

    def forward(self, hidden: torch.Tensor, fails: bool = False) -> torch.Tensor:
        hidden = self.inner(hidden)
        for block in self.blocks:
            hidden = block(*[hidden * (number + 1) for number in range(self.inputs)])
            self.outputs.append(StorageWeakRef(hidden.untyped_storage()))
        if fails:
            raise MemoryError("planted")
        return hidden.square().mean()

    @property
    def alive(self) -> int:
        return sum(not output.expired() for output in self.outputs)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(self.linear(torch.stack(inputs).sum(dim=0)))
        return result


def start(model: nn.Module, directory: Path) -> trainer_client.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return trainer_client.initialize(model=model, optimizer=optimizer, config=store_config(directory, "cpu"))[0]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("inputs", [1, 2])
def test_graphs_without_a_backward_are_freed_without_the_garbage_collector(inputs: int, tmp_path: Path) -> None:
    model = Deep(inputs)
    batch = torch.randn(2, WIDTH)
    with start(model, tmp_path) as engine:
        engine.backward(engine(batch))
        engine.step()
        with without_garbage_collection():
            for _ in range(3):
                with pytest.raises(MemoryError):
                    engine(batch, fails=True)
            assert model.alive == 0, "of failed forwards"
            for _ in range(3):
                engine(batch)
            # Where a block has several inputs, its hook and its graph refer to each other until the step.
            assert inputs > 1 or model.alive == 0, "of forwards whose loss was dropped"
            engine.backward(engine(batch))
            engine.step()
            assert model.alive == 0


def test_a_block_with_a_parameter_that_is_not_used_is_released_after_its_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mixture(None)
    for block in model.blocks:
        block.unused = nn.Parameter(torch.ones(3))
    with counting_gathered(monkeypatch, lambda unit: not unit.is_root) as seen, start(model, tmp_path) as engine:
        engine.backward(engine(torch.randn(2, WIDTH), EXPERTS[0]))
        engine.step()
        assert max(seen) <= 2 < BLOCKS
        assert torch.equal(engine.full_state_dict()["blocks.1.unused"], torch.ones(3))
