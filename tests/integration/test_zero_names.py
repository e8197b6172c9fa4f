"""What scripts for DeepSpeed do with single parameters of a model at stage 3, before and after `initialize`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import run_ranks
from trainer_client import utils, zero
from trainer_client.ops.adam import DeepSpeedCPUAdam
from trainer_client.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from trainer_client.runtime.zero.partition_parameters import ZeroParamStatus
from trainer_client.training.initial.deferred_init import recipe_of, replay


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden.square().mean()


def start(model: nn.Module, address: str, job: str, **config: Any) -> trainer_client.Engine:
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.1)
    return trainer_client.initialize(model=model, optimizer=optimizer, config=config_of(address, job, "nvme") | config)[
        0
    ]


def is_released(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE


def plain_copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().cpu().clone()


def copied(parameter: Any) -> torch.Tensor:
    """Return a copy of a parameter, which is gathered if need be, as many scripts do before they save a part."""
    if not is_released(parameter):
        return plain_copy(parameter)
    assert parameter.ds_numel == parameter.ds_shape.numel()
    with zero.GatheredParameters([parameter]):
        assert parameter.ds_status is ZeroParamStatus.AVAILABLE
        return plain_copy(parameter)


def test_values_that_were_changed_before_initialize_are_the_initial_ones(model_store: str, job: str) -> None:
    with zero.Init(seed=1):
        model = Model()
    loaded = torch.full((4, 4), 0.25)
    with zero.GatheredParameters(model.first.weight, modifier_rank=0):
        model.first.load_state_dict({"weight": loaded}, strict=False)
    untouched = replay(model.get_parameter("blocks.1.weight"))

    with start(model, model_store, job) as engine:
        assert torch.equal(copied(model.first.weight), loaded)
        assert torch.equal(copied(model.blocks[1].weight), untouched)
        assert is_released(model.blocks[1].weight)
        engine.backward(engine(torch.ones(2, 4)))
        utils.safe_update_full_grad_vectorized(
            list(model.parameters()), lambda gradient, parameter: torch.zeros(parameter.shape)
        )
        engine.step()
        # Adam's first step with a gradient of zeros changes nothing.
        with zero.unwrap_model_for_generation(engine) as whole:
            assert not any(map(is_released, whole.module.parameters()))
            assert torch.equal(model.first.weight, loaded)
        assert is_released(model.blocks[1].weight)


def test_programs_take_the_part_that_gathers_apart_before_they_generate(model_store: str, job: str) -> None:
    """TRL does this, step by step, around each generation at stage 3."""
    model = Model()
    inputs = torch.ones(2, 4)
    with start(model, model_store, job) as engine:
        with torch.no_grad():
            expected = engine(inputs)
        with zero.GatheredParameters(list(model.parameters())):
            offload = engine.optimizer.parameter_offload
            assert isinstance(offload, DeepSpeedZeRoOffload)
            named = itertools.chain(offload.module.named_parameters(), offload.module.ds_external_parameters())
            for _, parameter in named:
                parameter.ds_active_sub_modules.clear()
            for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            with torch.no_grad():
                assert torch.equal(engine.module(inputs), expected)
            offload._register_deepspeed_module(offload.module)
        assert is_released(model.first.weight)
        assert list(model.blocks[0].ds_external_parameters()) == []
        engine.backward(engine(inputs))
        engine.step()
        engine.tput_timer.update_epoch_count()
        assert (engine.tput_timer.epoch_count, engine.tput_timer.global_step_count) == (1, 1)


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_ranks_whose_group_takes_no_tensors_of_the_host_agree_on_values_before_initialize(backend: str) -> None:
    """A script for GPUs may make its group with NCCL alone."""
    run_ranks("tests.integration.support.early_ranks", 2, backend)


def test_initialize_may_be_called_within_the_context(model_store: str, job: str) -> None:
    with zero.Init(seed=1):
        model = Model()
        with start(model, model_store, job) as engine:
            with zero.Init():
                other = Model()
            assert recipe_of(other.first.weight)
        state = replay(other.first.weight)
    assert state.shape == (4, 4)
    assert engine.global_steps == 0


def test_external_parameters_that_a_constructor_registers_are_known_to_the_engine(model_store: str, job: str) -> None:
    model = Model()
    weight, last = model.get_parameter("blocks.0.weight"), model.blocks[2]
    zero.register_external_parameter(last, weight)
    # This parameter is not the model's any more, so its registration has no effect.
    zero.register_external_parameter(last, nn.Parameter(torch.zeros(3)))

    gathered: list[bool] = []
    with start(model, model_store, job) as engine:
        last.register_forward_pre_hook(lambda *_: gathered.append(not is_released(weight)))
        with torch.no_grad():
            engine(torch.ones(2, 4))
        zero.unregister_external_parameter(last, weight)
    assert gathered == [True]


def test_a_leaf_module_is_gathered_as_a_whole(model_store: str, job: str) -> None:
    model = Model()
    utils.set_z3_leaf_modules(model, [nn.Linear])
    utils.unset_z3_leaf_modules(model, ["ModuleList"], raise_if_not_found=False)

    with start(model, model_store, job) as engine, engine.gathered([model.first.weight]):
        assert not is_released(model.first.bias)
        assert all(is_released(block.weight) for block in model.blocks)


@pytest.mark.parametrize("is_launched", [True, False])
def test_ranks_have_their_group_where_a_model_is_built(tmp_path: Path, is_launched: bool) -> None:
    """transformers asks torch for the number of its rank while it loads a model under the context."""
    script = tmp_path / "join.py"
    script.write_text(
        "import torch, trainer_client\n"
        "with trainer_client.zero.Init(enabled=False):\n"
        "    assert not torch.distributed.is_initialized()\n"
        "with trainer_client.zero.Init():\n"
        "    assert torch.distributed.get_world_size() == 1\n"
        "with trainer_client.zero.Init():\n"
        "    pass\n"
        "torch.distributed.destroy_process_group()\n"
    )
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= launcher if is_launched else {}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=120)
