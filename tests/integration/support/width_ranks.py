"""One rank that fills and trains a model whose one layer is four times the store's host memory, and measures memory.

Run by test_tiling.py: `python -m tests.integration.support.width_ranks DIRECTORY KIND SMALL LARGE`, where the last two
are the addresses of the daemons for the small and for the large model. The layer is the tied weight of an embedding and
a head. Its values are from a file, because other sources need memory for a whole parameter.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client
from tests.integration.support.memory_ranks import MIB, PrivateMemory
from trainer_client import zero

FEATURES = 1024
VOCABULARY = 24576
LAYER_BYTES = VOCABULARY * FEATURES * 4
DAEMON = {"host_budget": LAYER_BYTES // 4, "nvme_budget": "2GiB"}
TILE_BYTES = 2 * MIB
TOKENS = 32
CHUNK = 16
# The number of this option of `mallopt`, from malloc.h.
M_MMAP_THRESHOLD = -3


class TiedModel(nn.Module):
    """A tied embedding and head of which a layer in between is trained, and the weight itself if `trains_weight`."""

    def __init__(self, vocabulary: int, *, trains_weight: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, FEATURES)
        self.between = nn.Linear(FEATURES, FEATURES, bias=False)
        self.head = nn.Linear(FEATURES, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(trains_weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.between(self.embedding(tokens)))
        return trainer_client.chunked_cross_entropy(hidden, self.head, tokens.roll(-1, dims=-1), tokens=CHUNK)


def config(address: str) -> dict[str, Any]:
    nvme = {"device": "nvme"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "paramserver": {
            "address": address,
            "kept_gradients": 0,
            "tiling": {"largest_tile": TILE_BYTES},
        },
    }


def measure(address: str, weights: Path, vocabulary: int, *, trained: bool) -> dict[str, Any]:
    """Fill and train a model; return the peak of private memory, without the memory before it, and the losses."""
    memory = PrivateMemory()
    losses = []
    with memory.watched() as start:
        with zero.Init(seed=7):
            model = TiedModel(vocabulary, trains_weight=trained)
        engine, *_ = trainer_client.initialize(
            model=model, config=config(address), weights=weights, strict_weights=False
        )
        with engine:
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(2):
                tokens = torch.randint(0, vocabulary, (1, TOKENS), generator=generator)
                losses.append(engine.backward(engine(tokens)).item())
                engine.step()
    return {"peak": memory.peak - start, "losses": losses}


def map_large_blocks() -> None:
    """Have malloc map blocks of 256 KiB or more, as docs/performance.md advises, so that freed ones leave the process.

    Otherwise small blocks fill the place of each tile's freed gradient, and the next tile's takes new memory.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 << 10)


def main() -> None:
    map_large_blocks()
    directory, trained = Path(sys.argv[1]), sys.argv[2] == "trained"
    small, large = sys.argv[3:]
    dist.init_process_group("gloo")
    # A first small model makes the process allocate all memory that does not depend on the model's size.
    measure(small, directory / "small.safetensors", 1024, trained=trained)
    gc.collect()
    result = measure(large, directory / "large.safetensors", VOCABULARY, trained=trained)
    (directory / f"result-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
