"""One of two ranks that begin jobs with models on the meta device, without memory; run by test_large_models.py.

Run as a program: `python -m tests.integration.support.large_model_ranks DIRECTORY ADDRESS`, with the environment of
torchrun. Each job has a name of its own at the daemon at ADDRESS.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import trainer_client
from tests.integration.support.equality import assert_equal
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import Run, build_model
from trainer_client import zero
from trainer_client.training.initial.deferred_init import replay


def build_large() -> nn.Module:
    ends: Any = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=257, n_positions=32, **ends))


def start(model: nn.Module, address: str, job: str, weights: Path | None = None) -> trainer_client.Engine:
    config = config_of(address, job, "nvme") | {"optimizer": {"type": "AdamW"}}
    return trainer_client.initialize(model=model, config=config, weights=weights)[0]


def initial_state(model: nn.Module, address: str, job: str) -> Mapping[str, torch.Tensor]:
    with start(model, address, job) as engine:
        return engine.full_state_dict()


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def recorded(seed: int) -> nn.Module:
    """Return a model without memory whose initialization was recorded with the seed of torch's generator."""
    torch.manual_seed(seed)
    with zero.Init():
        # build_model seeds torch's generator again. That has no effect, because zero.Init has drawn its seed already.
        return build_model(Run())


def check_rank_0_counts(rank: int, address: str) -> None:
    """Check that what a constructor does on rank 0 alone counts on all ranks, with the random numbers that follow."""
    torch.manual_seed(300)
    with zero.Init():
        first, second = nn.Linear(5, 3), nn.Linear(3, 3)
        if rank == 0:
            with torch.no_grad():
                first.weight[1:].fill_(2.0)
        third = nn.Linear(3, 3)
    model = nn.Sequential(first, second, third)
    own = {name: replay(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    state = initial_state(model, address, "on rank 0 alone")
    assert torch.equal(state["0.weight"][1:], torch.full((2, 5), 2.0))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, own)
    assert_equal(state, gathered[0])


def main() -> None:
    directory, address = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    # The values do not depend on the number of ranks, and rank 0's seed counts.
    state = initial_state(recorded(seed=100 + rank), address, "recorded")
    reference = recorded(seed=100).state_dict(keep_vars=True)
    assert_equal(state, {name: replay(tensor) for name, tensor in reference.items()})

    # It is enough if rank 0 has values.
    with torch.device("cpu" if rank == 0 else "meta"):
        model = build_model(Run())
    assert_equal(initial_state(model, address, "given"), build_model(Run()).state_dict())

    # A change by one rank before `initialize` changes the values of all ranks, also while the model is being built.
    with zero.Init():
        layer = nn.Linear(4, 4)
        with zero.GatheredParameters(layer.weight, modifier_rank=1):
            if rank == 1:
                nn.init.ones_(layer.weight)
    assert torch.equal(layer.weight, torch.ones(4, 4))
    name = "transformer.h.1.mlp.c_fc.weight"
    model = recorded(seed=200 + rank)
    with zero.GatheredParameters([model.get_parameter(name)], modifier_rank=1), torch.no_grad():
        model.get_parameter(name)[2].fill_(float(rank))
    with zero.GatheredParameters([model.get_parameter("transformer.wte.weight")]):
        embedding = model.get_parameter("transformer.wte.weight").detach().clone()
    expected = {n: replay(t) for n, t in recorded(seed=200).state_dict(keep_vars=True).items()}
    expected[name][2] = 1.0
    assert torch.equal(embedding, expected["transformer.wte.weight"])
    assert_equal(initial_state(model, address, "changed"), expected)

    check_rank_0_counts(rank, address)

    # If rank 0 has no values and another rank does, both ranks raise.
    with torch.device("meta" if rank == 0 else "cpu"):
        model = build_model(Run())
    with pytest.raises(trainer_client.ConfigError, match=r"transformer\.wte\.weight is on the meta device on rank 0"):
        initial_state(model, address, "refused")

    with zero.Init(seed=1):
        model = build_large()
    before = read_bytes()
    with start(model, address, "weights", weights=directory) as engine:
        (directory / f"read-{rank}").write_text(str(read_bytes() - before))
        state = engine.full_state_dict()
    files = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    assert_equal(state, files | {"lm_head.weight": files["transformer.wte.weight"]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
