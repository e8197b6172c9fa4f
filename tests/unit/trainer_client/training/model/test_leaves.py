"""The config marks leaves of stage 3 by class, by name and by the end of the name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from trainer_client.config.zero import ZeroSection
from trainer_client.training.model.leaves import is_leaf, mark_configured_leaves
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.model.unit_policy import find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()


def leaves_of(section: dict[str, Any]) -> list[str]:
    model = Model()
    mark_configured_leaves(model, ZeroSection.model_validate(section))
    return [name for name, module in model.named_modules() if is_leaf(module)]


@pytest.mark.parametrize(
    ("leaf_module", "expected"),
    [
        ({"classes": "Block"}, ["first", "second"]),
        ({"classes": [f"{Block.__module__}.Block"]}, ["first", "second"]),
        ({"names": ["second.experts"]}, ["second.experts"]),
        ({"name_suffixes": ["experts"], "names": "first"}, ["first", "first.experts", "second.experts"]),
        ({}, []),
    ],
)
def test_the_modules_that_the_config_names_are_leaves(leaf_module: dict[str, Any], expected: list[str]) -> None:
    assert leaves_of({"stage": 3, "leaf_module": leaf_module}) == expected
    assert leaves_of({"stage": 2, "leaf_module": leaf_module}) == []


def test_they_are_units() -> None:
    model = Model()
    section = ZeroSection.model_validate({"stage": 3, "leaf_module": {"names": ["second"]}})
    mark_configured_leaves(model, section)

    assert [unit.fqn for unit in find_units(model, list_parameters(model))] == ["", "second"]


def test_what_the_model_does_not_have_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"classes": ["Blok"], "names": ["third"], "name_suffixes": ["experts", "expert"]}
    with caplog.at_level(logging.WARNING):
        assert leaves_of({"stage": 3, "leaf_module": wanted}) == ["first.experts", "second.experts"]

    assert "leaf_module names what the model does not have: 'Blok', 'third', 'expert'" in caplog.text
