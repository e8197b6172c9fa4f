"""Units: which parameters form one, and what memory the parameters have while they are gathered and while released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.config.home import Home
from trainer_client.errors import ConfigError, ReleasedParameterError
from trainer_client.training.initial.initial_values import InitialValues
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.model.placement import GroupPlacement, Residence
from trainer_client.training.model.unit_policy import find_units
from trainer_client.training.ranks.collectives import Collectives


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.mixed = nn.ModuleList([nn.Linear(1, 1), nn.Bilinear(1, 1, 1)])
        self.stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].linear.weight = self.blocks[0].linear.weight
        self.last_bias = self.blocks[2].linear.bias


def members(model: nn.Module) -> dict[str, list[str]]:
    units = find_units(model, list_parameters(model))
    return {unit.fqn: [parameter.fqn for parameter in unit.parameters] for unit in units}


def test_blocks_of_outermost_uniform_lists_are_units_and_the_root_is_first() -> None:
    units = list(members(Model()))

    assert units == ["", "blocks.0", "blocks.1", "blocks.2", "stages.0.0", "stages.1.0"]


def test_tied_parameters_appear_once_and_belong_to_the_root_if_two_units_use_them() -> None:
    found = members(Model())

    assert found[""] == [
        "last_bias",
        "embedding.weight",
        "blocks.0.linear.weight",
        "mixed.0.weight",
        "mixed.0.bias",
        "mixed.1.weight",
        "mixed.1.bias",
    ]
    assert found["blocks.1"][0] == "blocks.1.linear.bias"
    everything = [fqn for fqns in found.values() for fqn in fqns]
    assert len(everything) == len(set(everything)) == len(list(Model().parameters()))


def test_integer_parameters_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("codes", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    with pytest.raises(ConfigError, match="codes"):
        list_parameters(model)


def flat_group(model: nn.Module, dtype: torch.dtype, *, trainable: bool = True) -> FlatGroup:
    return FlatGroup(
        unit="block",
        parameters=list_parameters(model),
        dtype=dtype,
        trainable=trainable,
        state_kinds=(pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ),
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
    )


def fill(group: FlatGroup, partition: torch.Tensor) -> None:
    group.allocate()
    group.flat.copy_(partition)


def test_what_is_hidden_is_released_and_its_memory_stays() -> None:
    model = nn.Linear(4, 2)
    group = flat_group(model, torch.float32)
    group.take_over()
    fill(group, torch.arange(group.slot_table.partition_numel, dtype=torch.float32))
    weight, saved = model.weight.detach().clone(), model.weight.detach()

    group.release_parameters()
    with pytest.raises(ReleasedParameterError):
        model.weight.sum()
    assert torch.equal(saved, weight), "what autograd has kept can be computed with"

    group.allocate()
    assert torch.equal(model.weight, weight)
    group.free()
    assert saved.isnan().any(), "what is computed with freed memory is noticed"


def private_bytes() -> int:
    """Return the bytes of private memory that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def test_a_released_group_has_no_memory_and_is_not_read() -> None:
    model = nn.Linear(2048, 2048)
    weight_bytes = model.weight.nbytes
    group = flat_group(model, torch.float32)
    group.take_over()

    before = private_bytes()
    fill(group, torch.zeros(()))
    assert private_bytes() > before + 0.9 * weight_bytes
    group.free()
    assert private_bytes() < before + 0.1 * weight_bytes

    assert model.weight.shape == (2048, 2048)
    assert model.weight.untyped_storage().nbytes() == 4
    with pytest.raises(ReleasedParameterError, match=r"weight.*linear"):
        model(torch.ones(2048))
    with pytest.raises(ReleasedParameterError, match=r"weight.*data"):
        print(model.weight.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_group_has_the_values_that_its_partitions_had(dtype: torch.dtype) -> None:
    model = nn.Linear(5, 7)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    group = flat_group(model, dtype)
    partition = InitialValues(model, list_parameters(model), Collectives(torch.device("cpu"))).partition(group)
    group.take_over()

    fill(group, partition)

    assert torch.equal(model.weight, weight.to(dtype))
    assert torch.equal(model.bias, bias.to(dtype))


def test_what_autograd_saved_is_right_again_after_a_refill() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    inputs = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(model(inputs).sum(), [inputs, *model.parameters()])
    group = flat_group(model, torch.float32)
    partition = InitialValues(model, list_parameters(model), Collectives(torch.device("cpu"))).partition(group)
    group.take_over()

    fill(group, partition)
    output = model(inputs).sum()
    group.free()
    fill(group, partition)
    actual = torch.autograd.grad(output, [inputs, *model.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_what_is_computed_with_freed_memory_is_nan() -> None:
    model = nn.Linear(4, 4)
    group = flat_group(model, torch.float32)
    group.take_over()
    group.allocate()
    group.flat.fill_(1.0)
    stored, bias = model.weight.t(), model.bias.view(2, 2)

    group.free()

    assert (torch.ones(1, 4) @ stored).isnan().any()
    assert bias.isnan().any()


@pytest.mark.parametrize(
    ("dtype", "trainable", "kinds"),
    [
        (torch.float32, True, [pb.KIND_PARAM, pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ, pb.KIND_GRAD]),
        (torch.bfloat16, True, [pb.KIND_PARAM, pb.KIND_MASTER, pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ, pb.KIND_GRAD]),
        (torch.bfloat16, False, [pb.KIND_PARAM]),
    ],
)
def test_a_group_declares_the_kinds_that_its_precision_needs(
    dtype: torch.dtype, trainable: bool, kinds: list[pb.Kind]
) -> None:
    group = flat_group(nn.Linear(5, 7), dtype, trainable=trainable)

    declared = group.to_proto(
        GroupPlacement(residence=Residence.SHARDED, parameters=Home.NVME, gradients=Home.HOST, optimizer=Home.HOST)
    )

    assert [spec.kind for spec in declared.kinds] == kinds
    assert declared.kinds[0].placement == pb.TIER_NVME
    assert all(spec.placement == pb.TIER_HOST for spec in declared.kinds[1:])
    assert declared.name == ("block[0:64]" if trainable else "block[0:64]:frozen")
    assert [(s.fqn, s.numel, s.position) for s in declared.shards] == [("weight", 35, 0), ("bias", 7, 48)]
