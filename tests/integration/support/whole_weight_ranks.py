"""One of some ranks whose losses use the whole weight of a layer in tiles, within `gathered`; run by test_tiling.py.

Run as `python -m tests.integration.support.whole_weight_ranks ADDRESS JOB`, with the environment of torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.integration.support.model_runs import config_of, start
from trainer_client.errors import TakenGradientError

VOCABULARY, FEATURES = 257, 64
MICRO_BATCHES = 2
Forward = Callable[[torch.Tensor], torch.Tensor]


class TiedModel(nn.Module):
    """A language model with a tied weight of 66 kB, whose forward returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.between = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.between(self.embedding(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, dims=-1).flatten())


def tokens_of(rank: int) -> torch.Tensor:
    """Return the tokens of a rank's micro-batches, [2, 16]."""
    return torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(rank))


def penalty_after(forward: Forward, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a loss whose backward begins with the whole weight."""
    return forward(tokens_of(rank)) + weight.square().mean()


def penalty_before(forward: Forward, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a loss whose backward ends with the whole weight, when the tiles have their other gradients already."""
    penalty = weight.square().mean()
    return forward(tokens_of(rank)) + penalty


def penalty_of_rank_0(forward: Forward, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a loss that uses the whole weight on rank 0 alone."""
    loss = forward(tokens_of(rank))
    return loss + weight.square().mean() if rank == 0 else loss


def product(forward: Forward, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a loss of logits that the script computes beside those of the head."""
    inputs = torch.linspace(-1, 1, 3 * FEATURES).view(3, FEATURES)
    return forward(tokens_of(rank)) + functional.linear(inputs * (rank + 1), weight).logsumexp(-1).mean()


def alone(forward: Forward, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a loss to which no tile contributes."""
    return weight.square().mean()


LOSSES = (penalty_after, penalty_before, penalty_of_rank_0, product, alone)


def check(config: dict[str, Any]) -> None:
    """Check that a step of each loss has the gradient of the plain model: the mean over ranks and micro-batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = TiedModel()
    engine = start(model, config | {"gradient_accumulation_steps": MICRO_BATCHES})
    weight = model.head.weight
    with engine:
        for loss in LOSSES:
            plain = TiedModel()
            plain.load_state_dict(engine.full_state_dict())
            for each in range(ranks):
                (loss(plain, plain.head.weight, each) / ranks).backward()
            for micro_batch in range(MICRO_BATCHES):
                with engine.gathered([weight]):
                    engine.backward(loss(engine, weight, rank))
                assert is_taken(weight)
                if micro_batch < MICRO_BATCHES - 1:
                    engine.step()
            for name, parameter in plain.named_parameters():
                found = engine.get_full(name, "grad")
                torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
            engine.step()


def is_taken(weight: torch.Tensor) -> bool:
    """Return whether the engine has taken a weight's gradient: a read is an error, or None for a weight in tiles."""
    try:
        return weight.grad is None
    except TakenGradientError:
        return True


def main() -> None:
    address, job = sys.argv[1:]
    dist.init_process_group("gloo")
    check(config_of(address, f"{job}-whole", "nvme"))
    check(config_of(address, f"{job}-tiles", "nvme", tiling="16KiB"))
    check(config_of(address, f"{job}-boundary", "cpu", tiling="16KiB", gradient_reduction="boundary"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
