"""Each optimizer of the contract has a record, with a range for each number and states that a tile can hold."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.optimizers.registry import OPTIMIZERS
from paramserver.vocabulary import KIND_FROM_WIRE
from storage.base.shard import MAX_OPTIMIZER_STATES, OPTIMIZER_STATES
from trainer_client.exchange.checkpoint import STATE_KINDS

FIELDS = HyperParameters.DESCRIPTOR.oneofs_by_name["optimizer"].fields


def test_the_registry_has_the_optimizers_of_the_contract_in_its_order() -> None:
    assert list(OPTIMIZERS) == [field.name for field in FIELDS]


def test_every_number_of_an_optimizer_has_a_range() -> None:
    for field in FIELDS:
        numbers = {each.name for each in field.message_type.fields if each.type != FieldDescriptor.TYPE_BOOL}
        assert OPTIMIZERS[field.name].ranges.keys() == numbers, field.name


def test_the_states_of_the_optimizers_are_those_that_the_engine_knows() -> None:
    states = [[KIND_FROM_WIRE[kind] for kind in optimizer.states] for optimizer in OPTIMIZERS.values()]
    assert {kind for kinds in states for kind in kinds} == OPTIMIZER_STATES
    assert max(map(len, states)) == MAX_OPTIMIZER_STATES
    assert {kind.value for kind in OPTIMIZER_STATES} == set(STATE_KINDS), "imports read the states of all optimizers"
