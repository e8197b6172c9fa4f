"""A small model whose units run one after the other: a linear layer of the root, then blocks with one layer each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    """A residual block.

    Attributes:
        inside: is called with the block's layer, before the block computes.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.inside: Callable[[nn.Linear], None] = lambda _: None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.inside(self.linear)
        return hidden + torch.tanh(self.linear(hidden))


class Tower(nn.Module):
    """A first layer and `blocks` blocks; its output is a loss. Two towers of the same arguments have the same values.

    Args:
        width: the width of every layer.
        blocks: the number of blocks.
        make_block: makes a block of a width.
    """

    def __init__(self, width: int, blocks: int, make_block: Callable[[int], nn.Module] = Block) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([make_block(width) for _ in range(blocks)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()
