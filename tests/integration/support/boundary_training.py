"""A model that checkpoints its blocks by itself, and its training with boundaries in different places."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainer_client
from tests.integration.support.daemon import MIB, Daemon
from tests.integration.support.equality import assert_equal

WIDTH = 64
TOKENS = 2048
BLOCKS = 12
# The model leaves less of such a budget than the 6 MiB that its boundaries have.
SMALL = 5 * MIB
# Each second boundary is computed again.
AGAIN = {"smallest": 1024, "recompute": True}


class Block(nn.Module):
    """A block whose inputs are of all kinds: not contiguous, integers, shared by all blocks, and views of these."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(
        self, hidden: torch.Tensor, scale: torch.Tensor, part: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the next hidden state, transposed as `hidden` [WIDTH, TOKENS] is."""
        if self.fails and torch.is_grad_enabled():
            raise ArithmeticError("planted")
        tokens = hidden.t()
        mixed = tokens[chosen] * scale[: tokens.shape[0]] + part.sum() * 1e-6
        return (tokens + torch.tanh(self.linear(mixed))).t()


class Model(nn.Module):
    """A model that checkpoints its blocks by itself."""

    def __init__(self, *, reentrant: bool, checkpoints: Callable[..., Any] = checkpoint) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.checkpoint = checkpoints
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.changes_boundary = False

    def outputs(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the output of each block, [WIDTH, TOKENS], for `tokens` [TOKENS, WIDTH]."""
        hidden = self.first(tokens).t()
        scale = tokens.abs().mean(1, keepdim=True).expand(-1, WIDTH).contiguous()
        chosen = tokens[:, 0].argsort()
        for block in self.blocks:
            before = hidden
            hidden = self.checkpoint(block, hidden, scale, scale[7:], chosen, use_reentrant=self.reentrant)
            if self.changes_boundary:
                with torch.no_grad():
                    before.add_(1.0)
            yield hidden

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return the loss."""
        # Only the last output is held, as in a model that has no other use for them.
        return deque(self.outputs(tokens), maxlen=1).pop().square().mean()


def config(daemon: Daemon | None, job: str, *, offload: bool = True, **section: Any) -> dict[str, Any]:
    nvme = {"device": "nvme"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "activation_checkpointing": {"cpu_checkpointing": offload},
        "paramserver": {
            **({} if daemon is None else {"address": daemon.address}),
            "job": job,
            "durability": "step",
            "activations": {"smallest": 1024},
            **section,
        },
    }


class Training:
    """A training of the model, of which each micro-batch has other tokens."""

    def __init__(
        self,
        given: dict[str, Any],
        *,
        reentrant: bool,
        accumulation: int = 1,
        prepare: Callable[[Model], None] = lambda model: None,
        **initialize: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = Model(reentrant=reentrant)
        prepare(self.model)
        self.accumulation = accumulation
        given = given | {"gradient_accumulation_steps": accumulation}
        self.engine, *_ = trainer_client.initialize(model=self.model, config=given, **initialize)
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """Make a step of several forwards, whose losses have one backward pass each, the last forward's first."""
        generator = torch.Generator().manual_seed(number)
        batches = [torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(self.accumulation)]
        for batch in batches:
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.losses.append(loss.item())
            self.engine.step()

    def finish(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Close the engine; return the losses and the weights."""
        with self.engine:
            return self.losses, self.engine.full_state_dict()


def trained(steps: int, *arguments: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    training = Training(*arguments, **options)
    for number in range(steps):
        training.step(number)
    return training.finish()


def assert_same(
    found: tuple[list[float], dict[str, torch.Tensor]], expected: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert found[0] == expected[0]
    assert_equal(found[1], expected[1])
