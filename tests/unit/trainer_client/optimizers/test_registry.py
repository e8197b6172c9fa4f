"""Each optimizer of the contract can be had from the config, and the default settings of its class make its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserver.contract.optimizers import registry as contract
from trainer_client.optimizers.registry import OPTIMIZERS, canonical_name, why_refused


def test_there_is_a_record_for_each_optimizer_of_the_contract() -> None:
    assert [name.lower() for name in OPTIMIZERS] == list(contract.OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_default_settings_make_the_row_of_the_optimizer(name: str) -> None:
    record = OPTIMIZERS[name]
    arguments: dict[str, Any] = {"lr": 0.1}
    optimizer = record.torch_class([torch.zeros(1)], **arguments)
    row = record.to_row(optimizer.param_groups[0], optimizer.defaults, 1)
    assert row.WhichOneof("optimizer") == name.lower()
    assert contract.find_problem(row) is None
    assert record.find_problem(optimizer.param_groups[0]) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_section_has_the_name_of_the_class_and_its_arguments(name: str) -> None:
    record = OPTIMIZERS[name]
    section = record.section.model_validate({"type": name})
    assert isinstance(record.torch_class([torch.zeros(1)], **section.params.arguments()), record.torch_class)


def test_names_are_found_in_deepspeeds_way() -> None:
    assert [canonical_name(name) for name in ("adamw", "FUSEDADAM", "DeepSpeedCPULion", "sgd")] == [
        "AdamW",
        "Adam",
        "Lion",
        "SGD",
    ]
    assert canonical_name("Lamb") == "Lamb"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FusedLamb", "not elementwise"),
        ("OneBitLamb", "not elementwise"),
        ("ZeroOneAdam", "compressed moments"),
        ("MuAdamW", "use AdamW"),
        ("RAdam", "none of the optimizers"),
    ],
)
def test_a_refusal_says_why_and_what_to_use(name: str, words: str) -> None:
    assert words in why_refused(name)
    assert "use " in why_refused(name)
