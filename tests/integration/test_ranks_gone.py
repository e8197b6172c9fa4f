"""Which bytes travel between ranks in which process group, and how soon a rank that has gone is noticed."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from paramserver.contract.limits import ELEMENT_ALIGNMENT
from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import Forked
from tests.integration.support.gone_ranks import TIMEOUT_SECONDS
from tests.integration.support.ranks import Launch
from tests.integration.support.waiting import wait_until

HEARTBEAT_TIMEOUT_SECONDS = 4.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks have written, by the name of the file."""
    directory = tmp_path_factory.mktemp("gone")
    limits = {"host_budget": "32MiB", "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_SECONDS}
    outputs = []
    with Daemon(directory / "state", limits) as daemon:
        program = "tests.integration.support.gone_ranks"
        for stopped in (1, 0):
            with Launch(program, 2, (daemon.address, directory, str(stopped)), directory) as launch:
                other = launch.ranks[1 - stopped]
                wait_until(partial(_has_ended, other), seconds=90)
                outputs.append(launch.output())
        assert "Traceback" not in daemon.log, daemon.log
    names = ["traffic-0", "traffic-1", "stopped-0", "stopped-1"]
    missing = [name for name in names if not (directory / f"{name}.json").is_file()]
    assert not missing, "\n".join(outputs)
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in names}


def _has_ended(process: Forked) -> bool:
    return process.poll() is not None


def _by_group(seen: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in seen:
        groups.setdefault(one["group"], []).append(one)
    return groups


def test_all_ranks_make_the_same_calls_in_each_group(reports: dict[str, Any]) -> None:
    mine, others = (_by_group(reports[f"traffic-{rank}"]["seen"]) for rank in range(2))

    assert mine == others
    assert len(mine) == 4


def test_no_host_data_travels_in_the_groups_of_tensors(reports: dict[str, Any]) -> None:
    """On an accelerator, the groups with weights and gradients have the device's backend, and the others are gloo's."""
    report = reports["traffic-0"]
    host, control, units, tensors = (_by_group(report["seen"])[name] for name in sorted(_by_group(report["seen"])))

    for one in units + tensors:
        assert all(dtype == "torch.float32" for dtype, _ in one["tensors"]), one
    assert {one["what"].split(".")[1] for one in units} == {"_allgather_base_"}
    # On the host a reduction of gradients is an all-reduce of a flat group, which has equal parts for the two ranks.
    reductions = [one for one in tensors if "allreduce" in one["what"]]
    assert reductions
    for one in reductions:
        assert all(numel % (2 * ELEMENT_ALIGNMENT) == 0 for _, numel in one["tensors"]), one
    # The norms of all parameters are the largest thing that the hosts exchange in a step.
    for one in host + control:
        assert all(numel < report["elements"] / 4 for _, numel in one["tensors"]), one


@pytest.mark.parametrize("stopped", [1, 0])
def test_the_others_learn_of_a_stopped_rank_from_the_daemon(reports: dict[str, Any], stopped: int) -> None:
    """The connections of a stopped process stay, so gloo alone would wait for the time-out of a collective.

    Rank 0 has the ranks' key-value store, which does not answer while it is stopped.
    """
    found = reports[f"stopped-{1 - stopped}"]

    assert found["kind"] == "CollectiveError"
    assert found["seconds"] < TIMEOUT_SECONDS / 4
    assert f"rank {stopped} of 2) has ended: no heartbeat for 4 s" in found["text"]
    assert f"rank {1 - stopped} (this one) is in " in found["text"]
    assert found["closing_seconds"] < TIMEOUT_SECONDS / 4
