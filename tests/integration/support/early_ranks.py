"""One of two ranks that read and change values before `initialize`; run by test_zero_names.py.

Run as a program: `python -m tests.integration.support.early_ranks BACKEND`, with the environment of torchrun. The
backend is that of the script's process group, as torch.distributed takes it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from trainer_client import zero


def main() -> None:
    dist.init_process_group(sys.argv[1])
    rank = dist.get_rank()
    torch.manual_seed(rank)
    with zero.Init():
        layer = nn.Linear(4, 4)
    with zero.GatheredParameters(layer.weight):
        weight = layer.weight.detach().clone()
    with zero.GatheredParameters([layer.weight, layer.bias], modifier_rank=1), torch.no_grad():
        layer.bias.fill_(rank)
        if rank == 1:
            layer.weight.copy_(weight + 1)

    # Rank 0's seed counts, and then rank 1's changes.
    assert torch.equal(layer.weight, weight + 1)
    assert layer.bias.tolist() == [1.0] * 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
