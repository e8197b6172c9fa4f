"""The placement of state: what the config's keys mean, what is refused, and how fractions are spread over the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trainer_client.config.home import Home
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError
from trainer_client.training.model.placement import PlacementPolicy, Residence, spread


def policy(stage: int, placement: dict[str, Any] | None = None, **zero: Any) -> PlacementPolicy:
    raw = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": stage, **zero},
        "paramserver": {"placement": placement or {}},
    }
    return PlacementPolicy.of(load_config(raw, {}))


def test_without_a_word_everything_is_on_the_device_and_a_missing_section_is_stage_0() -> None:
    assert PlacementPolicy.of(load_config({"train_batch_size": 1}, {})) == policy(0)
    for stage, residence in enumerate(
        (Residence.REPLICATED, Residence.RESIDENT, Residence.RESIDENT, Residence.SHARDED)
    ):
        (placed,) = policy(stage, offload_optimizer={"device": "none"}).assign([16])
        assert placed.residence is residence
        assert {placed.parameters, placed.gradients, placed.optimizer} == {Home.DEVICE}


def test_deepspeeds_keys_and_ours_mean_the_same() -> None:
    theirs = policy(3, offload_param={"device": "nvme"}, offload_optimizer={"device": "cpu", "ratio": 0.25})
    ours = policy(3, {"parameters": "nvme", "optimizer": {"host": 0.25, "device": 0.75}})

    assert theirs == ours


def test_gradients_go_where_their_optimizer_states_are_unless_the_config_says_otherwise() -> None:
    split = {"nvme": 0.5, "device": 0.5}
    beside = policy(3, {"optimizer": split}).assign([16] * 4)
    apart = policy(3, {"optimizer": split, "gradients": "device"}).assign([16] * 4)

    assert {(p.optimizer, p.gradients) for p in beside} == {(Home.NVME, Home.HOST), (Home.DEVICE, Home.DEVICE)}
    assert {p.gradients for p in apart} == {Home.DEVICE}
    spread_out = policy(2, {"optimizer": split, "gradients": {"nvme": 0.5, "host": 0.5}}).assign([16] * 4)
    assert Counter(p.gradients for p in spread_out) == {Home.NVME: 2, Home.HOST: 2}


def test_fractions_are_met_everywhere_in_the_model_as_nearly_as_whole_groups_allow() -> None:
    sizes = [5, 1, 3, 8, 2, 2, 7, 1, 4, 6] * 4
    shares = {Home.HOST: 0.3, Home.NVME: 0.5, Home.DEVICE: 0.2}

    homes = spread(shares, sizes)

    for stop in range(1, len(sizes) + 1):
        for home, share in shares.items():
            given = sum(size for size, chosen in zip(sizes[:stop], homes, strict=False) if chosen is home)
            assert abs(given - share * sum(sizes[:stop])) <= max(sizes)


def test_an_offload_that_the_stage_does_not_have_is_ignored_as_in_deepspeed() -> None:
    on_cpu = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}

    assert policy(0, **on_cpu) == policy(0)
    assert policy(2, **on_cpu) == policy(2, offload_optimizer={"device": "cpu"})


@pytest.mark.parametrize(
    ("stage", "placement", "zero", "words"),
    [
        (1, {"parameters": "host"}, {}, ["stage is 1", "placement.parameters", "needs stage 3"]),
        (0, {"optimizer": "nvme"}, {}, ["stage is 0", "placement.optimizer", "needs stage 1, 2 or 3"]),
        (3, {"optimizer": "gpu"}, {}, ["paramserver.placement.optimizer", "paramserver.gpu_budget", '"device"']),
        (3, {"optimizer": {"host": 0.3, "nvme": 0.6}}, {}, ["paramserver.placement.optimizer", "sum to 0.9"]),
        (3, {"optimizer": "disk"}, {}, ["paramserver.placement.optimizer", "'disk'", "'nvme'"]),
        (
            3,
            {"parameters": "host"},
            {"offload_param": {"device": "cpu"}},
            ["zero_optimization.offload_param", "paramserver.placement.parameters", "remove one"],
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    stage: int, placement: dict[str, Any], zero: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(stage, placement, **zero)

    assert [word for word in words if word not in str(caught.value)] == []
