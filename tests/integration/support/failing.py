"""Failures on demand: the n-th operation of torch, or a module's next forward or backward, raises."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integration.support.tower import Block, Tower

WIDTH = 32
BLOCKS = 3


class Failing(TorchDispatchMode):
    """A context in which torch's `at`-th operation raises OutOfMemoryError, as any operation that needs memory may.

    Operations are counted from 1, together with those of the engine's hooks. If `at` is None, none raises.

    Attributes:
        calls: the number of operations so far.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self._at:
            raise torch.OutOfMemoryError(f"as told, in call {self.calls}, of {func}")
        return func(*args, **kwargs or {})


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, error: type[BaseException]) -> torch.Tensor:
        ctx.error = error
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ctx.error("as told, in backward")


class FailingBlock(Block):
    """A block that raises on demand.

    Attributes:
        fails: the exception that the next forward raises; None: it raises none.
        fails_in_backward: the exception that the backward of the next forward raises; None: it raises none.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.fails: type[BaseException] | None = None
        self.fails_in_backward: type[BaseException] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error("as told, in forward")
        if self.fails_in_backward is not None:
            error, self.fails_in_backward = self.fails_in_backward, None
            failing: torch.Tensor = _RaiseInBackward.apply(hidden, error)  # type: ignore[no-untyped-call]
            return failing
        return hidden


def failing_tower() -> Tower:
    """Return a tower of blocks that raise on demand."""
    return Tower(WIDTH, BLOCKS, FailingBlock)


def inputs(step: int, rank: int = 0) -> torch.Tensor:
    """Return the inputs of a rank in a step, [4, WIDTH]."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
