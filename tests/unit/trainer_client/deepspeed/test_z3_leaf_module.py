"""Leaf modules are marked by class, by name and by the end of the name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from trainer_client.deepspeed.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from trainer_client.training.model.owners import own
from trainer_client.training.model.parameters import list_parameters


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), Experts(), Experts())


@pytest.mark.parametrize(
    "cls", [Experts, "Experts", f"{Experts.__module__}.{Experts.__qualname__}"], ids=["class", "name", "full-name"]
)
def test_modules_of_a_class_are_marked_and_unmarked(cls: type[nn.Module] | str) -> None:
    model = build()

    assert set_z3_leaf_modules(model, [cls]) == [model[1], model[2]]
    assert get_z3_leaf_modules(model) == [model[1], model[2]]
    assert z3_leaf_module(model[1])
    assert not z3_leaf_module(model[0])
    assert unset_z3_leaf_modules(model, [cls]) == [model[1], model[2]]
    assert get_z3_leaf_modules(model) == []


def test_modules_are_marked_by_name_and_by_the_end_of_the_name() -> None:
    model = build()

    assert set_z3_leaf_modules_by_name(model, ["1", "7"], raise_if_not_found=False) == ([model[1]], ["7"])
    assert set_z3_leaf_modules_by_suffix(model, [".experts.0"])[1] == []
    assert len(get_z3_leaf_modules(model)) == 3


def test_what_is_not_found_is_an_error() -> None:
    with pytest.raises(ValueError, match="it has Experts, Linear, ModuleList, Sequential"):
        set_z3_leaf_modules(build(), ["Expert"])
    assert set_z3_leaf_modules(build(), ["Expert"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match=r"is called \['block'\]"):
        set_z3_leaf_modules_by_name(build(), ["block"])


def test_a_mark_that_comes_too_late_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, engine = build(), Experts()
    own(list_parameters(model), engine)

    with caplog.at_level(logging.WARNING):
        set_z3_leaf_module(model[1], True)

    assert "after initialize()" in caplog.text


def test_a_mark_is_the_attribute_that_deepspeed_sets() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))

    set_z3_leaf_module(model[0], True)
    assert model[0]._z3_leaf

    set_z3_leaf_module(model[0], False)
    assert not getattr(model[0], "_z3_leaf", False)
