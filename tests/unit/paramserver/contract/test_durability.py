"""The text of a durability class is read in one place, for the config and for StoreClient."""

from __future__ import annotations

import re

import pytest

from paramserver.contract.durability import (
    DURABILITY_PATTERN,
    durability_text,
    durable_every_steps,
    parse_durability,
)
from paramserver.rpc import convert


@pytest.mark.parametrize(
    ("text", "steps"), [("step", 1), ("none", 0), ("snapshot:1", 1), ("snapshot:20", 20), ("snapshot:007", 7)]
)
def test_a_class_says_how_often_a_commit_is_durable(text: str, steps: int) -> None:
    parsed = parse_durability(text)
    assert durable_every_steps(parsed) == convert.durability(parsed).every_steps == steps
    assert parse_durability(durability_text(parsed)) == parsed
    # The config does not take leading zeros.
    assert bool(re.fullmatch(DURABILITY_PATTERN, text)) == ("0" not in text.partition(":")[2][:1])


@pytest.mark.parametrize(
    "text", ["", "steps", "snapshot", "snapshot:", "snapshot:0", "snapshot:-1", "step:2", "none:1"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no durability class"):
        parse_durability(text)
    assert not re.fullmatch(DURABILITY_PATTERN, text)
