"""Collectives of device tensors between two processes: right values, and the order of streams that NCCL has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.support.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    result = tmp_path_factory.mktemp("ranks") / "found"
    run_ranks("tests.device.collective_ranks", 2, result)
    return [json.loads(result.with_suffix(f".{rank}").read_text()) for rank in range(2)]


def test_the_values_are_right_on_both_ranks(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert found[rank]["values"] == {
            "gathered": [1, 1, 1, 2, 2, 2],
            "part": [2, 2, 2] if rank == 0 else [4, 4, 4],
            "summed": [3, 3, 3],
            "shown": [2, 2, 2],
            "piece": [2, 2, 2],
            "host": [3],
        }


def test_a_collective_returns_at_once_and_its_wait_stops_the_stream_and_not_the_host(
    found: list[dict[str, Any]],
) -> None:
    for rank in range(2):
        assert found[rank]["asynchronous"] == {"pending": True, "host waited": False, "doubled": [4, 4, 4]}


def test_a_result_that_is_used_without_a_wait_is_a_race(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert found[rank]["races"] == [["all_reduce", "aten::mul"]]
        assert found[rank]["races at the end"] == []


def test_one_group_keeps_the_order_of_the_calls_on_streams_that_lag_differently(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert found[rank]["streams"] == {"first": [3, 3], "second": [21, 21]}


def test_a_collective_takes_its_bytes_in_virtual_time(found: list[dict[str, Any]]) -> None:
    assert found[0]["seconds of a gather"] == pytest.approx(6 * 4 / 1e3)
