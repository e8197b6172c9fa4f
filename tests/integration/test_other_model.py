"""A job that holds another model is not gone on with, and the error says how to go on. Each of these ways works."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainer_client
from paramserver.admin.cli import app
from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import ROOT
from tests.integration.support.model_runs import config_of, start
from tests.integration.support.two_models import stderr_of_script, train_here
from trainer_client import Engine, JobConflictError, OtherModelError
from trainer_client.exchange.export import export_step
from trainer_client.exchange.import_checkpoint import import_checkpoint


def test_another_model_in_the_same_directory_is_refused_and_each_way_on_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_here(monkeypatch, tmp_path, "8", "2") == 2

    refused = stderr_of_script(tmp_path, "16", "1", exit_code=1)

    state_dir = tmp_path / "paramserver-state"
    assert "parameter '0.weight' has shape [8, 4] in the store and [16, 4] in this model" in refused
    assert "paramserver.job, which is 'default'" in refused and f"which is {state_dir})" in refused
    assert 'paramserver.resume = "never" deletes nothing' in refused
    assert train_here(monkeypatch, tmp_path, "8", "1") == 3
    assert train_here(monkeypatch, tmp_path, "16", "1", '{"paramserver": {"job": "other"}}') == 1
    assert train_here(monkeypatch, tmp_path, "16", "1", '{"paramserver": {"state_dir": "other"}}') == 1
    serve, delete = (shlex.split(command) for command in re.findall("`(paramserver.*?)`", refused))
    assert (serve[0], delete[0]) == ("paramserver", "paramserver-admin")
    daemon = subprocess.Popen([sys.executable, "-m", "paramserver", *serve[1:]], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        assert "deleted job default" in delete_when_it_serves(delete[1:])
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
    assert train_here(monkeypatch, tmp_path, "16", "1") == 1
    # The other job of the directory is still there.
    assert train_here(monkeypatch, tmp_path, "16", "1", '{"paramserver": {"job": "other"}}') == 2


def delete_when_it_serves(arguments: list[str]) -> str:
    """Run the admin tool with `arguments`, again and again while no daemon answers, and return its output."""
    for _ in range(200):
        ended = CliRunner().invoke(app, arguments, input="y\n")
        if "no daemon answers" not in ended.output:
            break
        time.sleep(0.1)
    assert ended.exit_code == 0, ended.output
    return ended.output


def begin(address: str, model: nn.Module, **section: Any) -> None:
    """Begin the job with a model, and leave it at its initial values."""
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "paramserver": {"address": address, "job": "a job", **section},
    }
    trainer_client.initialize(model=model, config=config)[0].close()


def test_with_an_operators_daemon_the_command_deletes_the_job_there(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        begin(daemon.address, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)))

        with pytest.raises(OtherModelError) as refused:
            begin(daemon.address, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))

        message = str(refused.value)
        assert "parameters '2.weight', '2.bias' are not in this model" in message
        assert "parameter '1.weight' has shape [8, 8] in the store and [1, 8] in this model" in message
        assert "another daemon (paramserver.address)" in message
        with pytest.raises(JobConflictError, match="has committed step 0 and resume is 'never'") as never:
            begin(daemon.address, nn.Linear(4, 8), resume="never")
        (command,) = re.findall("`(paramserver-admin .*?)`", message)
        assert command in str(never.value) and not isinstance(never.value, OtherModelError)
        assert command == f"paramserver-admin delete-job --address {daemon.address} 'a job'"
        assert CliRunner().invoke(app, shlex.split(command)[1:], input="y\n").exit_code == 0
        begin(daemon.address, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))


class Net(nn.Module):
    """A model that defines its last layer first or last, so its parameters have two orders."""

    def __init__(self, *, last_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if last_first:
            self.last = nn.LayerNorm(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        if not last_first:
            self.last = nn.LayerNorm(4)
        self.uses_last = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return (self.last(hidden) if self.uses_last else hidden).square().mean()


@pytest.mark.parametrize("units", [{}, {"max_parameters": 25}], ids=["in place", "laid out anew"])
def test_the_counts_of_updates_follow_their_parameters_into_another_order(
    model_store: str, job: str, units: dict[str, Any]
) -> None:
    def counts(net: Net, steps: int, **section: Any) -> dict[str, int]:
        with start(net, config_of(model_store, job, **section)) as engine:
            for step in range(steps):
                net.uses_last = step >= steps - 2
                engine.backward(engine(torch.ones(2, 4)))
                engine.step()
            names = [name for name, _ in net.named_parameters()]
            return dict(zip(names, engine._passes._step.update_counts, strict=True))

    before = counts(Net(last_first=False), 5)
    assert (before["blocks.1.bias"], before["last.bias"]) == (5, 2)
    again = counts(Net(last_first=True), 0, units=units)
    assert list(again) != list(before)
    assert again == before


def begin_with_groups(net: Net, address: str, job: str, decay: float = 0.1, **section: Any) -> Engine:
    """Return an engine whose optimizer decays the weights of the blocks, and neither biases nor the last layer."""
    groups = [
        {"params": [p for p in net.blocks.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in net.blocks.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    config = config_of(address, job, **section)
    engine: Engine = trainer_client.initialize(model=net, optimizer=optimizer, config=config)[0]
    return engine


def train(engine: Engine) -> None:
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()


def groups_of(engine: Engine) -> list[tuple[set[str], float, float]]:
    """Return the names of the parameters of each group, with its rate and its weight decay."""
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return [
        ({name_of[id(parameter)] for parameter in group["params"]}, group["lr"], group["weight_decay"])
        for group in engine.optimizer.param_groups
    ]


@pytest.mark.parametrize("units", [{}, {"max_parameters": 25}], ids=["in place", "laid out anew"])
def test_the_groups_of_parameters_follow_them_into_another_order(
    model_store: str, job: str, tmp_path: Path, units: dict[str, Any]
) -> None:
    """A resumed run has them, also a group that was added in mid-run, and so has one that loads a checkpoint."""
    net = Net(last_first=False)
    with begin_with_groups(net, model_store, job) as engine:
        engine.optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 0.5})
        engine.optimizer.param_groups[1]["lr"] = 0.25
        train(engine)
        engine.save_checkpoint(tmp_path)
        before = groups_of(engine)
    with begin_with_groups(Net(last_first=True), model_store, job, units=units) as engine:
        assert groups_of(engine) == before
        train(engine)
    with begin_with_groups(Net(last_first=True), model_store, f"{job}-2") as engine:
        engine.load_checkpoint(tmp_path)
        assert groups_of(engine) == before


def test_groups_are_exported_and_imported_by_the_names_of_their_parameters(tmp_path: Path) -> None:
    """The daemon knows the order of the job's first run, and the commit is one of a run with another order."""
    config = {"host_budget": "64MiB"}
    with Daemon(tmp_path / "state", config) as daemon:
        for last_first in (False, True):
            with begin_with_groups(Net(last_first=last_first), daemon.address, "job") as engine:
                train(engine)
                expected = groups_of(engine)
        assert daemon.stop() == 0
    with Daemon(tmp_path / "state", config) as daemon:
        export_step(daemon.address, "job", None, tmp_path / "dcp", format="dcp", optimizer=True)
        import_checkpoint(daemon.address, "again", tmp_path / "dcp")
        with begin_with_groups(Net(last_first=True), daemon.address, "again", decay=0.0) as engine:
            assert groups_of(engine) == expected
