"""A shard group's name says its unit, whatever characters the unit's own name has."""

from __future__ import annotations

import pytest

from trainer_client.client.transport.shard_group_name import ShardGroupName


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (ShardGroupName(unit="(root)", start=0, stop=8), "(root)[0:8]"),
        (
            ShardGroupName(unit="blocks.0", start=8, stop=16, variant=":frozen:bfloat16"),
            "blocks.0[8:16]:frozen:bfloat16",
        ),
        (ShardGroupName(unit="a[1:2]", start=0, stop=4), "a[1:2][0:4]"),
    ],
)
def test_the_unit_can_be_read_from_the_name(name: ShardGroupName, text: str) -> None:
    assert str(name) == text
    assert ShardGroupName.unit_of(text) == name.unit


def test_a_name_without_a_range_has_no_unit() -> None:
    assert ShardGroupName.unit_of("group") == ""
