"""Arguments that a StoreClient cannot send are refused by name, before anything goes to the store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_client import ConfigError, TensorSpec
from trainer_client.client.store_client.types import check_name, check_values

SPARSE = torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (SPARSE, r"tensor 'a' is sparse \(torch\.sparse_coo\), .* give its to_dense\(\)"),
        (torch.empty(2, device="meta"), "tensor 'a' is on the meta device, so it has no values"),
        ([1.0, 2.0], r"tensor 'a' is of type list; give a torch\.Tensor"),
        (None, "tensor 'a' is of type NoneType"),
    ],
)
def test_values_that_the_store_cannot_keep_are_named(value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_values("tensor 'a'", value)


@pytest.mark.parametrize("value", [[1.0], (2,), "float32"])
def test_a_spec_is_a_spec_or_a_tensor(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"tensor 'a': give a TensorSpec or a torch.Tensor, not a {type(value).__name__}"
    ):
        TensorSpec.given("a", value)


def test_a_tensor_without_values_is_enough_for_a_spec() -> None:
    spec = TensorSpec(shape=(2, 3), dtype=torch.bfloat16)
    assert TensorSpec.given("a", torch.empty(2, 3, dtype=torch.bfloat16, device="meta")) == spec
    assert TensorSpec.given("a", spec) is spec


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weight\ud800", r"the name 'weight\\ud800' of a tensor cannot be encoded as UTF-8"),
        (7, "the name of a tensor is a str, and 7 is of type int"),
        (b"weight", "the name of a tensor is a str"),
    ],
)
def test_names_that_cannot_be_sent_are_named(name: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_name("tensor", name)
