"""A rank that fails while others wait for it: the others get an error at once. A failure in a rank's own work disturbs
no other rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import run_ranks


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The reports of both ranks: for each rank, its results by scene."""
    directory = tmp_path_factory.mktemp("failing")
    with Daemon(directory / "state", {"host_budget": "32MiB"}) as daemon:
        run_ranks("tests.integration.support.failing_ranks", 2, daemon.address, directory)
        assert "Traceback" not in daemon.log, daemon.log
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("scene", ["forwards_that_fail_alone", "forwards_that_fail_alike"])
def test_a_forward_that_fails_may_be_repeated(scenes: list[dict[str, Any]], scene: str) -> None:
    for report in scenes:
        assert report[scene] == report["undisturbed"]


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("fail_in_gather", "the gather of "),
        ("fail_in_backward", "a backward pass"),
        ("fail_in_step", "engine.step()"),
        ("fail_in_change", "a change of states"),
    ],
)
def test_the_others_are_told_at_once_and_the_job_goes_on(scenes: list[dict[str, Any]], where: str, what: str) -> None:
    failed, waited = (report["failing_together"][where] for report in scenes)

    assert failed["kind"] == "OutOfMemoryError"
    assert waited["seconds"] < 15
    if waited["kind"] == "CollectiveError":
        assert f"rank 0 was in {what}" in waited["text"]
        assert "which it gave up (OutOfMemoryError: as told" in waited["text"]
    else:
        # The store reports the failure first where the rank's next request is for memory or a commit.
        assert waited["kind"] == "StepAbortedError"
        assert "rank 0" in waited["text"]
        assert "restart the run" in waited["text"]
    for report in (failed, waited):
        assert report["afterwards"]["kind"] in ("CollectiveError", "PhaseError")
        assert "restart the job" in report["afterwards"]["text"], report
        assert report["afterwards"]["seconds"] < 15
        assert report["weights"] == scenes[0]["undisturbed"]
