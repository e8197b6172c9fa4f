"""The unit that a group's name is made of can be read from it, whatever characters the unit has."""

from __future__ import annotations

import pytest

from trainer_client.transport.group_names import group_name, unit_of


@pytest.mark.parametrize("unit", ["(root)", "layers.3", "a[0]", "a[0:1]:frozen"])
@pytest.mark.parametrize("trainable", [True, False])
def test_the_unit_is_in_the_name(unit: str, trainable: bool) -> None:
    assert unit_of(group_name(unit, 16, 32, trainable=trainable, suffix=":float16")) == unit
