"""What a job needs on a device, counted by hand, and the error where it does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.model.placement import PlacementPolicy
from trainer_client.training.model.unit_policy import find_units
from trainer_client.training.run.declaration import assign, flat_groups
from trainer_client.training.run.device_budget import DeviceNeed, bytes_of_copies, need_of, require_room
from trainer_client.training.step.precision import PrecisionPolicy
from trainer_client.training.store_optimizer import make_optimizer

META = torch.device("meta")
# Blocks of 64 x 64 elements and one of 128 x 64; a root of 32 x 64.
BLOCK, LARGE, ROOT = 64 * 64, 128 * 64, 32 * 64


def need(stage: int, optimizer: str, parameters: str = "device") -> DeviceNeed:
    """Return what one of two ranks needs for a model of five blocks in fp32 with AdamW."""
    model = nn.ModuleDict(
        {
            "first": nn.Linear(64, 32, bias=False),
            "blocks": nn.ModuleList(
                [nn.Sequential(nn.Linear(64, 128 if index == 2 else 64, bias=False)) for index in range(5)]
            ),
        }
    ).to(META)
    config = load_config(
        {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "paramserver": {"placement": {"optimizer": optimizer} | ({"parameters": parameters} if stage == 3 else {})},
        },
        {},
    )
    listed = list_parameters(model)
    made = make_optimizer(None, config.optimizer, None, listed, ())
    precision = PrecisionPolicy.of(config)
    units = [
        flat_groups(spec, made, precision, rank=0, world_size=2, device=META) for spec in find_units(model, listed)
    ]
    groups = [group for unit in units for group in unit]
    placed = assign(groups, PlacementPolicy.of(config))
    return need_of(units, placed, bytes_of_copies(groups, placed, 1))


def test_stage_3_with_everything_in_the_store_needs_its_three_largest_units() -> None:
    found = need(3, "host", "host")

    assert found == DeviceNeed(
        homes={"parameters": 0, "gradients": 0, "optimizer": 0},
        units=4 * (LARGE + BLOCK + BLOCK),
        copies=2 * (4 * BLOCK + LARGE + ROOT),
    )


def test_what_lives_on_the_device_is_counted() -> None:
    elements = 4 * BLOCK + LARGE + ROOT

    at_home = need(3, "device")
    whole = need(1, "device")

    # A rank has half of all states in stage 3, and in stage 1 the whole parameters, which are not gathered.
    assert at_home.homes == {"parameters": 2 * elements, "gradients": 2 * elements, "optimizer": 4 * elements}
    assert at_home.units == 4 * (LARGE + BLOCK + BLOCK)
    assert whole.homes == {"parameters": 4 * elements, "gradients": 2 * elements, "optimizer": 4 * elements}
    assert whole.units == 0
    # Parameters that are on the device anyway have no copies there.
    assert (at_home.copies, whole.copies) == (0, 0)


def test_a_job_that_does_not_fit_is_refused_with_the_figures_and_the_keys() -> None:
    gib = 1 << 30
    wanted = DeviceNeed(
        homes={"parameters": 3 * gib, "gradients": 0, "optimizer": 11 * gib}, units=gib // 2, copies=gib
    )

    require_room(wanted, "cuda:1", wanted.nbytes, 24 * gib)
    with pytest.raises(ConfigError) as refused:
        require_room(wanted, "cuda:1", wanted.nbytes - 1, 16 * gib)

    for part in (
        "cuda:1 has 15.5 GiB of 16.0 GiB free",
        "needs 15.5 GiB",
        "parameters 3.0 GiB, optimizer 11.0 GiB, paramserver.gpu_budget 1.0 GiB, units that are gathered at once "
        "512.0 MiB",
        "offload_optimizer",
        "paramserver.placement",
        "paramserver.units",
    ):
        assert part in str(refused.value)
