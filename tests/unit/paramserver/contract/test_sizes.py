"""A size is read as a whole, or refused: a part of it would be another size."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from paramserver.contract.sizes import Size
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError

READER = TypeAdapter(Size)


@pytest.mark.parametrize(
    ("written", "expected"),
    [(5, 5), ("7", 7), ("1_000", 1000), (" 1.5 GiB ", 3 << 29), (".5kb", 500), ("2g", 2 * 10**9), ("64MiB", 64 << 20)],
)
def test_sizes_are_numbers_with_or_without_a_unit(written: Any, expected: int) -> None:
    assert READER.validate_python(written) == expected


@pytest.mark.parametrize(
    "written", ["1,5GiB", "1,000,000", "1.2.3MiB", "100%", "5GiB/s", "64 GiB 1", "-1", "", "GiB", True]
)
def test_what_is_no_size_as_a_whole_is_refused(written: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"write a number of bytes, or a number with one of the units KiB, MiB, GiB, TiB"
    ):
        READER.validate_python(written)


@pytest.mark.parametrize("key", ["gpu_budget", "kept_gradients"])
def test_a_key_of_the_training_config_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"paramserver.{key} = '1,5GiB' is refused: write a number of bytes"):
        load_config({"paramserver": {key: "1,5GiB"}}, {})
