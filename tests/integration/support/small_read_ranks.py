"""One of two ranks that read small parameters outside of the forward; run by test_model_use.py."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer_client import initialize


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.offsets = nn.Parameter(torch.arange(80.0))
        self.large = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scale * self.large(hidden) + self.offsets.sum()


def check(config: dict[str, Any]) -> None:
    """Train, and compare what rank 0 reads alone with plain PyTorch. Both ranks have the same batches."""
    torch.manual_seed(0)
    model = Scaled()
    plain = copy.deepcopy(model)
    stored, optimizer = (torch.optim.SGD(each.parameters(), lr=1e-4) for each in (model, plain))
    with initialize(model=model, optimizer=stored, config=config)[0] as engine:
        for _ in range(3):
            loss = engine(torch.ones(2, 8)).square().mean()
            if dist.get_rank() == 0:
                assert model.scale.item() == plain.scale.item()
                assert model.offsets.tolist() == plain.offsets.tolist()
            engine.backward(loss)
            engine.step()
            plain(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                with torch.no_grad():
                    assert torch.equal(model.scale.exp(), plain.scale.exp())
                    assert torch.equal(model.offsets.clone(), plain.offsets)
        assert [type(parameter).__name__ for parameter in model.parameters()] == ["ReleasedParameter"] * 4


def main() -> None:
    dist.init_process_group("gloo")
    for config in json.loads(sys.argv[1]):
        check(config)
    dist.destroy_process_group()
