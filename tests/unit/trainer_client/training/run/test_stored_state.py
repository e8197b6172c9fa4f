"""The numbers of updates and the groups in a commit belong to the names of parameters, whatever their order in the
model."""

from __future__ import annotations

from typing import Any

from trainer_client.training.run import client_state
from trainer_client.training.run.stored_state import counts_of, decode_stored, groups_of, sort_counts, sort_groups

NAMES, COUNTS = ["blocks.0", "blocks.1", "b", "a"], [10, 10, 2, 3]
OTHER_ORDER = ["b", "blocks.0", "a", "blocks.1"]
GROUPS: list[dict[str, Any]] = [{"params": [[0, 1]], "lr": 1.0}, {"params": [[3, 3], [2, 2]], "lr": 2.0}]


def test_counts_are_found_by_name_in_another_order() -> None:
    state = {"update_counts": COUNTS, "sorted_counts": sort_counts(COUNTS, NAMES)}
    assert counts_of(state, NAMES) == COUNTS
    assert counts_of(state, OTHER_ORDER) == [2, 10, 3, 10]


def test_equal_counts_take_no_room_in_a_commit() -> None:
    assert sort_counts([7, 7, 7], ["a", "b", "c"]) is None
    assert sort_counts([], []) is None
    assert counts_of({"update_counts": [7, 7], "sorted_counts": None}, ["b", "a"]) == [7, 7]


def test_the_counts_of_earlier_versions_are_in_the_order_of_the_model() -> None:
    state = of_an_earlier_version()
    assert counts_of(state, NAMES) == COUNTS
    assert groups_of(state, NAMES) == GROUPS


def of_an_earlier_version() -> dict[str, Any]:
    counters = {"global_steps": 10, "train_batch_size": 1}
    return decode_stored(client_state.encode({"counters": counters, "update_counts": COUNTS, "optimizer": GROUPS}))


def test_groups_are_found_by_name_in_another_order() -> None:
    state = {"optimizer": GROUPS, "sorted_groups": sort_groups(GROUPS, NAMES)}
    # In the same order, a group also has its parameters in the order in which the user gave them.
    assert groups_of(state, NAMES) == GROUPS
    assert groups_of(state, OTHER_ORDER) == [
        {"params": [[1, 1], [3, 3]], "lr": 1.0},
        {"params": [[0, 0], [2, 2]], "lr": 2.0},
    ]
    assert groups_of({"optimizer": None, "sorted_groups": None}, NAMES) is None


def test_a_group_with_all_parameters_takes_no_room_in_a_commit() -> None:
    assert sort_groups([{"params": [[0, 3]]}], NAMES) is None
    assert sort_groups([{"params": [[0, 2]]}], NAMES) == [[[1, 3]]]
