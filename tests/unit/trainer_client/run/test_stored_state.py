"""The numbers of updates in a commit belong to the names of parameters, whatever their order in the model."""

from __future__ import annotations

from trainer_client.run import client_state
from trainer_client.run.stored_state import counts_of, decode_stored, sort_counts

NAMES, COUNTS = ["blocks.0", "blocks.1", "b", "a"], [10, 10, 2, 3]
OTHER_ORDER = ["b", "blocks.0", "a", "blocks.1"]


def test_counts_are_found_by_name_in_another_order() -> None:
    state = {"update_counts": COUNTS, "sorted_counts": sort_counts(COUNTS, NAMES)}
    assert counts_of(state, NAMES) == COUNTS
    assert counts_of(state, OTHER_ORDER) == [2, 10, 3, 10]


def test_equal_counts_take_no_room_in_a_commit() -> None:
    assert sort_counts([7, 7, 7], ["a", "b", "c"]) is None
    assert sort_counts([], []) is None
    assert counts_of({"update_counts": [7, 7], "sorted_counts": None}, ["b", "a"]) == [7, 7]


def test_the_counts_of_earlier_versions_are_in_the_order_of_the_model() -> None:
    counters = {"global_steps": 10, "train_batch_size": 1}
    state = decode_stored(client_state.encode({"counters": counters, "update_counts": COUNTS}))
    assert counts_of(state, NAMES) == COUNTS
