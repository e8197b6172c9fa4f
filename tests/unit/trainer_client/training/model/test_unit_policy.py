"""Unit policies: which modules are units, for each way in which a user can choose them."""

from __future__ import annotations

import pytest
from torch import nn

from trainer_client.config.paramserver import UnitsSection
from trainer_client.errors import ConfigError
from trainer_client.training.model.leaves import is_leaf, mark_leaf
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.model.unit_policy import (
    UnitPolicy,
    choose_policy,
    find_units,
    modules_of_classes,
    modules_up_to,
    repeated_blocks,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 100, bias=False)


def names(model: nn.Module, policy: UnitPolicy) -> list[str]:
    return [unit.fqn for unit in find_units(model, list_parameters(model), policy)]


def sizes(model: nn.Module, policy: UnitPolicy) -> dict[str, int]:
    return {
        u.fqn: sum(p.shape.numel() for p in u.parameters) for u in find_units(model, list_parameters(model), policy)
    }


def test_classes_are_units_in_the_models_order_and_the_outermost_one_counts() -> None:
    policy = modules_of_classes(["Linear", "Layer", "Embedding"])

    assert names(Model(), policy) == ["", "embedding", "layers.0", "layers.1", "head"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (10_000, ["", "embedding", "layers.0", "layers.1", "norm", "head"]),
        (
            50,
            [
                "",
                "embedding",
                *(f"layers.{n}.{m}" for n in (0, 1) for m in ("attention", "mlp.0", "mlp.1")),
                "norm",
                "head",
            ],
        ),
    ],
)
def test_by_size_a_unit_is_the_largest_module_that_fits_or_a_leaf(limit: int, expected: list[str]) -> None:
    assert names(Model(), modules_up_to(limit)) == expected


def test_weights_that_two_units_share_belong_to_the_root() -> None:
    model = Model()
    model.head.weight = model.embedding.weight

    found = sizes(model, modules_of_classes(["Embedding", "Linear"]))

    assert (found[""], found["embedding"], found["head"]) == (408, 0, 0)  # The root has the norm's 8 elements too.


def test_a_module_that_the_model_holds_twice_is_one_unit() -> None:
    model = Model()
    model.layers = nn.ModuleList([model.layers[0], model.layers[1], model.layers[0]])

    found = sizes(model, choose_policy(UnitsSection(), None))

    assert {name: size for name, size in found.items() if name} == {"layers.0": 96, "layers.1": 96}


def test_a_callable_chooses_modules() -> None:
    model = Model()

    assert names(model, lambda _: [model.head, model.layers[1]]) == ["", "layers.1", "head"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (modules_of_classes(["Layr"]), r"'Layr'; did you mean Layer"),
        (modules_of_classes(["Bert"]), r"'Bert'; .*Embedding.*Layer"),
        (lambda model: [model], "the model itself cannot be a unit"),
        (lambda model: [model.layers], "layers, a ModuleList without a forward"),
        (
            lambda model: [model.layers[0], model.layers[0].mlp],
            r"layers\.0\.mlp cannot be a unit within the unit layers\.0",
        ),
        (lambda _: [nn.Linear(1, 1)], "a Linear cannot be a unit: it is not a module of the model"),
    ],
)
def test_what_cannot_be_a_unit_is_refused(policy: UnitPolicy, message: str) -> None:
    model = Model()

    with pytest.raises(ConfigError, match=message):
        find_units(model, list_parameters(model), policy)


def test_config_and_argument_may_not_both_choose() -> None:
    def policy(model: nn.Module) -> list[nn.Module]:
        return []

    assert choose_policy(UnitsSection(), policy) is policy
    with pytest.raises(ConfigError, match="unit_policy"):
        choose_policy(UnitsSection(classes=("Layer",)), policy)


def test_a_leaf_is_a_unit_in_place_of_the_units_within_it() -> None:
    model = Model()
    for leaf in (model.embedding, model.layers[1]):
        mark_leaf(leaf, True)

    assert names(model, repeated_blocks) == ["", "embedding", "layers.0", "layers.1"]
    assert names(model, modules_of_classes(["Linear"])) == [
        "",
        "embedding",
        *(f"layers.0.{name}" for name in ("attention", "mlp.0", "mlp.1")),
        "layers.1",
        "head",
    ]


def test_a_container_that_is_a_leaf_stands_for_its_modules() -> None:
    model = Model()
    mark_leaf(model.layers, True)

    assert names(model, modules_of_classes(["Linear"])) == ["", "layers.0", "layers.1", "head"]


def test_a_leaf_within_a_unit_changes_nothing() -> None:
    model = Model()
    mark_leaf(model.get_submodule("layers.0.mlp"), True)

    assert names(model, repeated_blocks) == ["", "layers.0", "layers.1"]


def test_a_model_that_is_a_leaf_has_the_root_only() -> None:
    model = Model()
    mark_leaf(model, True)
    assert names(model, repeated_blocks) == [""]

    mark_leaf(model, False)
    assert not is_leaf(model)
    assert names(model, repeated_blocks) == ["", "layers.0", "layers.1"]


def test_a_leaf_without_parameters_is_no_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    mark_leaf(model[1], True)

    assert names(model, repeated_blocks) == [""]
