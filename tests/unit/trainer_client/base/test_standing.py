"""A mark says what happens to a key, and which values mean that the feature is off."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from trainer_client.base.section import Agreement, Section, agreement_of, mark_of
from trainer_client.base.standing import Refused, WithoutEffect, is_absent, is_at_most_one, is_off


class Inner(Section):
    enabled: bool = False
    speed: int = 1


class Outer(Section):
    kept: int = 1
    quiet: Annotated[bool, WithoutEffect(why="it is always so")] = False
    refused: Annotated[Inner, Refused(why="it is not built", instead="remove it")] = Inner()


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        0,
        "none",
        {},
        {"enabled": False, "inner": {"enabled": True}},
        {"inner": {"shared": {"enabled": False}}, "size": 3},
        Inner(speed=2),
    ],
)
def test_these_values_mean_off(value: Any) -> None:
    assert is_off(value)


@pytest.mark.parametrize("value", [True, 1, "fp16", {"inner": {"shared": {"enabled": True}}}, Inner(enabled=True)])
def test_these_values_mean_on(value: Any) -> None:
    assert not is_off(value)


def test_a_section_without_a_switch_is_on_once_it_is_there() -> None:
    assert is_absent(None) and is_absent(False) and is_absent({})
    assert not is_absent({"a": 0})


def test_a_number_of_parts_is_off_up_to_one() -> None:
    assert is_at_most_one(None) and is_at_most_one(0) and is_at_most_one(1)
    assert not is_at_most_one(2)


def test_a_refused_key_is_an_error_at_its_place_unless_it_is_off() -> None:
    assert Outer.model_validate({"refused": {"enabled": False, "speed": 3}}).refused.speed == 3
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"refused": {"enabled": True}})

    (detail,) = caught.value.errors()
    assert detail["loc"] == ("refused",)
    assert detail["msg"] == "it is not built; remove it"


def test_the_marks_of_a_key_can_be_read() -> None:
    fields = Outer.model_fields

    assert mark_of(fields["quiet"], WithoutEffect) == WithoutEffect(why="it is always so")
    assert mark_of(fields["kept"], WithoutEffect) is None
    assert mark_of(fields["refused"], Refused) is not None


def test_ranks_agree_on_keys_that_are_honoured() -> None:
    assert agreement_of(Outer.model_fields["kept"]) is Agreement.RUN
    assert agreement_of(Outer.model_fields["quiet"]) is Agreement.NONE
    assert agreement_of(Outer.model_fields["refused"]) is Agreement.NONE
    assert list(Outer(quiet=True).values(Agreement.RUN)) == [("kept", "1")]
