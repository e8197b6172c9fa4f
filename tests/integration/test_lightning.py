"""The example for Lightning runs over the store, and gives the losses that it gives with Lightning's DDP."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed: `make peers` installs it"
)

# Under autocast, a difference in the last bit of a weight may change the rounding of a bf16 value.
TOLERANCES = {"steps": 1e-5, "accumulated": 1e-5, "epochs": 1e-5, "mixed": 1e-2}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.peers)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the runs gave, by library, and the number of ranks."""
    found: dict[str, Any] = {"ranks": request.param}
    limits = {"host_budget": "64MiB", "nvme_budget": "1GiB"}
    with Daemon(tmp_path_factory.mktemp("lightning") / "state", limits) as daemon:
        for library, store in (("ddp", "ddp"), ("store", daemon.address)):
            directory = tmp_path_factory.mktemp(library)
            run_ranks("tests.integration.support.lightning_runs", request.param, store, directory, str(request.param))
            found[library] = json.loads((directory / "results.json").read_text())
    return found


@pytest.mark.parametrize("name", TOLERANCES)
def test_losses_and_rates_are_those_of_lightning(results: dict[str, Any], name: str) -> None:
    ours, expected = results["store"][name], results["ddp"][name]

    # One rank has the bits of Lightning. Two ranks add their gradients up in another order.
    tolerance = 0 if results["ranks"] == 1 else TOLERANCES[name]
    assert ours["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)
    assert ours["rates"] == expected["rates"]
    if tolerance == 0:
        assert ours["accuracies"] == expected["accuracies"]


def test_a_checkpoint_is_a_manifest_from_which_training_goes_on(results: dict[str, Any]) -> None:
    resumed = results["store"]["resumed"]

    assert resumed["again"] == resumed["expected"]
    assert resumed["rates"][0] == resumed["rates"][1]
    assert resumed["accuracies"][0] == resumed["accuracies"][1]
    assert 0 < resumed["validated"] <= 1
    assert list(resumed["files"]) == ["paramserver_checkpoint.json"]
    assert resumed["files"]["paramserver_checkpoint.json"] < 64 << 10


def test_what_cannot_be_honoured_is_an_error(results: dict[str, Any]) -> None:
    by_hand, precision = results["store"]["refusals"]

    assert "automatic_optimization = False is not honoured" in by_hand
    assert "Trainer(precision='64-true') is not honoured" in precision
