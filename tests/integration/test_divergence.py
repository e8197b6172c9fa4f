"""Ranks may run different modules where all of them read from one store. Otherwise they get an error that names the
place of each rank, and no rank gets the bytes of another unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.support.daemon import Daemon
from tests.integration.support.diverging import TIMEOUT_SECONDS, TOKENS, Chooser
from tests.integration.support.ranks import run_ranks


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The reports of both ranks: for each rank, its results by scene."""
    directory = tmp_path_factory.mktemp("diverging")
    with Daemon(directory / "state", {"host_budget": "32MiB"}) as daemon:
        run_ranks("tests.integration.support.diverging", 2, daemon.address, directory)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_different_units_of_one_size_are_not_mixed(scenes: list[dict[str, Any]]) -> None:
    for report in scenes:
        failure = report["different_experts"]
        assert failure["kind"] == "CollectiveMismatchError"
        assert "rank 0: experts.1" in failure["text"]
        assert "rank 1: experts.2" in failure["text"]


def test_a_unit_that_the_others_do_not_expect_ends_in_an_error_with_the_place_of_each_rank(
    scenes: list[dict[str, Any]],
) -> None:
    first, second = (report["an_unexpected_expert"] for report in scenes)

    assert "CollectiveTimeoutError" in (first["kind"], second["kind"])
    for failure in (first, second):
        assert failure["kind"] in ("CollectiveTimeoutError", "CollectiveError")
        assert failure["seconds"] < 5 * TIMEOUT_SECONDS
    assert "rank 0 (this one) is in the gather of experts.1" in first["text"]
    assert "rank 1 was in the gather of experts.3" in first["text"]
    assert "rank 1 (this one) is in the gather of experts.3" in second["text"]
    assert "rank 0 was in the gather of experts.1" in second["text"]


def test_nobody_leaves_while_another_rank_still_reads(scenes: list[dict[str, Any]]) -> None:
    last, first = (report["a_rank_that_reads_last"]["losses"] for report in scenes)

    assert last == [*first, *first]


def test_waiting_for_an_idle_rank_ends_and_says_where_it_is(scenes: list[dict[str, Any]]) -> None:
    waiting, idle = (report["an_idle_rank"] for report in scenes)

    assert waiting["kind"] == "CollectiveTimeoutError"
    assert "rank 0 (this one) is in the gather of (root)" in waiting["text"]
    assert "rank 1 was in none, after " in waiting["text"]
    # The idle rank arrives after the other rank has given up, and perhaps after it has left the run.
    assert idle["kind"] in ("CollectiveError", "CollectiveTimeoutError", "StepAbortedError")


def test_a_rank_that_dies_is_noticed_at_once(scenes: list[dict[str, Any]]) -> None:
    survivor, dead = (report["a_rank_that_dies"] for report in scenes)

    assert dead is None
    assert survivor["kind"] in ("CollectiveError", "CollectiveTimeoutError")
    assert "rank 1 " in survivor["text"]


def test_with_one_store_ranks_run_what_they_like_and_the_numbers_are_right(scenes: list[dict[str, Any]]) -> None:
    """The numbers equal those of a loop that adds up the gradients of both ranks by hand."""
    model = Chooser()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    losses: list[list[float]] = [[], []]
    for index in range(4):
        gradients: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(2):
            model.order = [[0, 1, 2, 0], [2, 0]][rank] if index % 2 else [[3], [1, 2]][rank]
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            losses[rank].append(loss.item())
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    gradients[parameter] = gradients.get(parameter, 0) + parameter.grad / 2
                    parameter.grad = None
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    for rank in range(2):
        found = scenes[rank]["one_sided"]
        assert found["losses"] == pytest.approx(losses[rank], rel=1e-5)
        expected = {name: value.double().sum().item() for name, value in model.state_dict().items()}
        assert found["sums"] == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_ranks_that_use_other_experts_of_a_block_train_as_ddp_does(tmp_path: Path) -> None:
    """A block is over on all ranks at once, although one of them has no gradients of an expert."""
    with Daemon(tmp_path / "state", {"host_budget": "32MiB"}) as daemon:
        run_ranks("tests.integration.support.unlike_experts", 2, daemon.address, tmp_path / "weights.pt")
    found: dict[str, dict[str, torch.Tensor]] = torch.load(tmp_path / "weights.pt")
    expected = found.pop("plain")
    assert len(found) == 3
    for weights in found.values():
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
