"""One of the ranks whose gradients are read before their reduction, and coalesced.

test_reductions.py runs `python -m tests.integration.support.reduction_ranks ADDRESS`. Each rank compares what its
engines give with plain PyTorch, which computes the gradients of all ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client
from tests.integration.support.failing import WIDTH, inputs
from trainer_client.utils import safe_get_full_grad

RATE = 0.125
RANKS = 2
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


def build() -> nn.Module:
    torch.manual_seed(1)
    # The sizes are odd, so that the ranks' partitions cut parameters.
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))


def start(address: str, job: str, zero: dict[str, Any], **keys: Any) -> trainer_client.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": zero,
        "paramserver": {"address": address, "job": job},
        **keys,
    }
    return trainer_client.initialize(model=build(), config=config)[0]


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs(number, rank)) * 3 - 1).float().square().mean()
    return loss


class Plain:
    """The same training in plain PyTorch, with the mean of the gradients of all ranks."""

    def __init__(self) -> None:
        self.model = build()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def backward(self, number: int) -> None:
        for rank in range(RANKS):
            (loss_of(self.model, number, rank) / RANKS).backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def assert_same_gradients(self, engine: trainer_client.Engine) -> None:
        for parameter, own in zip(engine.module.parameters(), self.model.parameters(), strict=True):
            gradient = safe_get_full_grad(parameter)
            assert gradient is not None and own.grad is not None
            torch.testing.assert_close(gradient, own.grad)

    def assert_same_weights(self, engine: trainer_client.Engine) -> None:
        torch.testing.assert_close(engine.full_state_dict(), dict(self.model.state_dict()))


def read_before_the_reduction(address: str, stage: str, rank: int) -> None:
    """Gradients are read after each backward pass, also where only the last one of a step reduces."""
    plain = Plain()
    keys = {"gradient_accumulation_steps": 3}
    with start(address, f"read-{stage}", STAGES[stage], **keys) as engine:
        weight = next(iter(engine.module.parameters()))
        for first in (0, 3):
            for number in range(first, first + 3):
                engine.backward(loss_of(engine, number, rank), scale_wrt_gas=False)
                plain.backward(number)
                plain.assert_same_gradients(engine)
                plain.assert_same_gradients(engine)
                engine.step()
            plain.step()
        plain.assert_same_weights(engine)
        with engine.no_sync():
            engine.backward(loss_of(engine, 9, rank), scale_wrt_gas=False)
            plain.backward(9)
            plain.assert_same_gradients(engine)
            try:
                engine.get_local(weight, "grad")
            except RuntimeError as error:
                assert "look after that" in str(error)
            else:
                raise AssertionError("a part of a gradient was read that is not reduced")


def coalesce(address: str, stage: str, rank: int) -> None:
    """Several backward passes are reduced once, at the end of the context."""
    plain = Plain()
    with start(address, f"coalesced-{stage}", STAGES[stage]) as engine:
        for first in (0, 3):
            with engine.coalesce_grad_reduction():
                for number in range(first, first + 3):
                    engine.backward(loss_of(engine, number, rank))
                    plain.backward(number)
                for refused in (engine.step, engine.coalesce_grad_reduction().__enter__):
                    try:
                        refused()
                    except RuntimeError as error:
                        assert "leave it first" in str(error)
                    else:
                        raise AssertionError(f"{refused} is possible within the context")
            local = engine.get_local(next(iter(engine.module.parameters())), "grad")
            assert local is not None
            plain.assert_same_gradients(engine)
            engine.step()
            plain.step()
        plain.assert_same_weights(engine)


def main() -> None:
    address = sys.argv[1]
    dist.init_process_group("gloo")
    for act in (read_before_the_reduction, coalesce):
        for stage in STAGES:
            act(address, stage, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
