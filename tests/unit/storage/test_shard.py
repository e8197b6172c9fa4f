"""The parameters of a model compare by their fields."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage.base.shard import DType, Durability, JobSpec, Parameters, ParameterSpec

FIRST = ParameterSpec(fqn="a", shape=(3, 4), dtype=DType.FLOAT32, trainable=True)
SECOND = replace(FIRST, fqn="b")


def spec(*parameters: ParameterSpec) -> JobSpec:
    return JobSpec(name="job", world_size=1, local_ranks=1, parameters=parameters, durability=Durability(every_steps=1))


def test_equal_parameters_are_equal_models_and_are_found_by_name() -> None:
    one, other = spec(FIRST, SECOND), spec(replace(FIRST), replace(SECOND))
    assert one == other and one.model == other.model and (one.model != other.model) is False
    assert hash(one.model) == hash(other.model) and one.parameters is not other.parameters
    assert one.model.by_name == {"a": FIRST, "b": SECOND}
    assert isinstance(one.without_ranks().parameters, Parameters) and one.without_ranks().parameters is one.parameters


@pytest.mark.parametrize(
    "different",
    [
        (SECOND, FIRST),
        (FIRST,),
        (FIRST, replace(SECOND, fqn="c")),
        (FIRST, replace(SECOND, shape=(12,))),
        (FIRST, replace(SECOND, dtype=DType.BFLOAT16)),
        (FIRST, replace(SECOND, trainable=False)),
    ],
)
def test_other_parameters_are_another_model(different: tuple[ParameterSpec, ...]) -> None:
    one, other = spec(FIRST, SECOND), spec(*different)
    assert one != other and one.model != other.model and (one.model == other.model) is False
