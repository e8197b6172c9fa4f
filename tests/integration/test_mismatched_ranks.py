"""Ranks that were started with different configs get the same error at once, and start no daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support.ranks import run_ranks

HEAD = "the ranks of this run do not have the same config, model and optimizer:"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mismatched")
    run_ranks("tests.integration.support.mismatched_ranks", 3, directory)
    return directory


@pytest.fixture(scope="module")
def reports(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize(
    ("scene", "lines"),
    [
        (
            "stage",
            [
                "bf16.enabled: false on ranks 0, 2; true on rank 1",
                'zero_optimization.offload_param.device: "cpu" on ranks 0, 2; not set on rank 1',
                "zero_optimization.stage: 3 on ranks 0, 2; 2 on rank 1",
            ],
        ),
        ("job", ['paramserver.job: "another" on rank 0; "one" on ranks 1-2']),
        (
            "batch",
            ["train_micro_batch_size_per_gpu: 2 on rank 0; 3 on rank 1; 4 on rank 2"],
        ),
        (
            "shape",
            [
                "parameter 4: layer2.weight [8, 8] torch.float32 trained on ranks 0-1; layer2.weight [16, 8] "
                "torch.float32 trained on rank 2"
            ],
        ),
        (
            "frozen",
            [
                "parameter 2: layer1.weight [8, 8] torch.float32 frozen on rank 0; layer1.weight [8, 8] torch.float32 "
                "trained on ranks 1-2"
            ],
        ),
        ("argument", ["initialize(unit_policy=...): given on rank 0; not set on ranks 1-2"]),
    ],
)
def test_all_ranks_are_told_who_has_what(reports: list[dict[str, Any]], scene: str, lines: list[str]) -> None:
    texts = {report[scene]["text"] for report in reports}

    assert [report[scene]["kind"] for report in reports] == ["RankMismatchError"] * 3
    assert len(texts) == 1
    head, *shown, _ = texts.pop().splitlines()
    assert head == HEAD
    assert [line for line in lines if f"  {line}" not in shown] == [], shown
    if len(lines) == 1 and scene not in ("frozen",):
        assert len(shown) == 1


@pytest.mark.parametrize("scene", ["state_dir", "own_daemon", "fewer_layers", "optimizer"])
def test_nobody_waits(reports: list[dict[str, Any]], scene: str) -> None:
    assert {report[scene]["kind"] for report in reports} == {"RankMismatchError"}
    assert all(report[scene]["seconds"] < 10 for report in reports)


def test_ranks_of_one_node_have_one_state_directory_and_nothing_was_started(
    directory: Path, reports: list[dict[str, Any]]
) -> None:
    text = reports[0]["state_dir"]["text"]

    for rank in range(3):
        assert f'"{directory}/state-of-{rank}" on rank {rank}' in text
        assert not (directory / f"state-of-{rank}").exists()
    assert "paramserver.state_dir (or nvme_path): " in text
    assert "paramserver.host_budget: 33554432 on ranks 0-1; 34603008 on rank 2 (ranks of one node)" in text
    assert not (directory / "state").exists(), "of all the other scenes"
    own = reports[0]["own_daemon"]["text"]
    assert 'paramserver.address (or $PARAMSERVER_ADDRESS): not set on ranks 0-1; "given" on rank 2' in own
    assert "/nowhere/" not in own


def test_a_list_that_is_shorter_and_a_group_that_differs_are_shown(reports: list[dict[str, Any]]) -> None:
    assert (
        "parameter 4: layer2.weight [8, 8] torch.float32 trained on rank 0; none, of 4 on ranks 1-2"
        in (reports[0]["fewer_layers"]["text"])
    )
    assert (
        ": lr = 0.25 of parameter group 0 on ranks 0, 2; lr = 0.5 of parameter group 0 on rank 1"
        in (reports[0]["optimizer"]["text"])
    )


def test_nodes_may_have_daemons_of_their_own(reports: list[dict[str, Any]]) -> None:
    assert [report["nodes"]["text"] for report in reports] == [""] * 3
