"""One of two ranks that evaluate a model which each has built from other random numbers; run by
test_inference_sources.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def main() -> None:
    (address,) = sys.argv[1:]
    dist.init_process_group("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "paramserver": {"address": address},
    }
    expected = build(100).state_dict()
    # The first engine puts the weights of rank 0 into the store, and the second one finds them there.
    for _ in range(2):
        engine: Any = trainer_client.initialize(model=build(100 + dist.get_rank()), config=config)[0]
        with engine:
            found = engine.full_state_dict()
            assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    # The other ranks raise an error if rank 0 does.
    with torch.device("meta"):
        model = build(0)
    model[1] = nn.Linear(4, 3)
    try:
        trainer_client.initialize(model=model, config=config)
    except trainer_client.ConfigError as error:
        assert ("0.weight is on the meta device" if dist.get_rank() == 0 else "see its message") in str(error)
    else:
        raise AssertionError("a model with values and without them was taken")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
