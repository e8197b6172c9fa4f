"""Training through the store on the device: the same bits however late its streams are, and the CPU's to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.device import lag
from tests.device.training import assert_close, launch, train_on_device
from tests.integration.support.daemon import Daemon
from tests.integration.support.training import Run, assert_bit_equal, train_plain

RUN = Run(steps=3, clipping=0.5, schedule=True)
# With dropout there is no reference on the CPU, whose generator draws other numbers.
RUNS = {"gpt2": RUN, "dropout and accumulation": replace(RUN, steps=2, dropout=0.1, accumulation=2)}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {"host_budget": "128MiB", "nvme_budget": "1GiB"}
    with Daemon(tmp_path_factory.mktemp("store") / "state", config) as daemon:
        yield daemon.address
        assert "Traceback" not in daemon.log, daemon.log


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_lag_changes_no_bit(address: str, tier: str, name: str) -> None:
    run, job = RUNS[name], f"{tier}-{name}".replace(" ", "-")
    prompt = train_on_device(run, address, f"{job}-prompt", tier, lag.SCHEDULES["nothing late"])
    if not run.dropout:
        assert_close(prompt, train_plain(run))
    for index, late in enumerate(("all late", "random")):
        assert_bit_equal(train_on_device(run, address, f"{job}-{index}", tier, lag.SCHEDULES[late]), prompt)
        assert lag.most_outstanding() > 10


def test_lag_changes_no_bit_on_two_ranks(address: str, tmp_path: Path) -> None:
    prompt, *late = launch(replace(RUN, steps=2), address, "nvme", ["nothing late", "all late", "random"], tmp_path)
    for result in late:
        assert_bit_equal(result, prompt)
    assert all(torch.isfinite(weight).all() for weight in prompt.weights.values())
