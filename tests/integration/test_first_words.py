"""What rank 0 says while a run starts: which job is new and where, what it waits for, and what is not there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import trainer_client
from tests.integration.support.daemon import Daemon, run_serve


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("store") / "state") as daemon:
        yield daemon


def open_job(section: dict[str, Any], **zero_optimization: Any) -> trainer_client.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero_optimization,
        "paramserver": section,
    }
    return trainer_client.initialize(model=nn.Linear(2, 2), config=config)[0]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_new_job_is_told_with_its_name_and_its_store(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    open_job({"address": daemon.address, "job": "a name"}).close()
    assert warnings(caplog) == [f"paramserver: new job 'a name', in the store at {daemon.address}"]


def test_a_new_job_of_its_own_daemon_is_told_with_directory_and_budgets(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("own"))
    nvme = {"device": "nvme", "nvme_path": "store"}
    section = {"host_budget": "32MiB", "nvme_budget": "1.5GiB", "reattach_timeout_seconds": 0}
    open_job(section, stage=3, offload_param=nvme).close()
    place = Path("store").absolute()
    new_job = (
        f"paramserver: new job 'default', in the state directory {place} (host_budget 32.0 MiB, nvme_budget 1.5 GiB)"
    )
    assert new_job in warnings(caplog)


def test_a_directory_whose_parent_is_not_there_is_refused_with_the_command_to_write(tmp_path: Path) -> None:
    path = tmp_path / "local_nvme" / "run"
    text = re.escape(
        f"state directory {path} is not made, because {path.parent} does not exist, as where a disk is not mounted: "
        f"mount it, or run `mkdir -p {path.parent}`, or correct paramserver.state_dir or zero_optimization.*.nvme_path"
    )
    with pytest.raises(trainer_client.LocalDaemonError, match=text):
        open_job({}, stage=3, offload_param={"device": "nvme", "nvme_path": str(path)})
    assert not path.parent.exists()
    for option in ("--state-dir", "--nvme-dir"):
        ended = run_serve("--state-dir", str(tmp_path / "state"), "--host-budget", "16MiB", option, str(path))
        assert ended.returncode == 1
        assert f"run `mkdir -p {path.parent}`, or choose another {option}\n" in ended.stderr


def test_the_wait_for_a_daemon_that_does_not_answer_is_told_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"unix:{tmp_path}/none.sock"
    monkeypatch.setattr("trainer_client.training.run.node_store._SERVING_SECONDS", 0.0)
    with pytest.raises(trainer_client.StoreUnavailableError):
        open_job({"address": address})
    with pytest.raises(trainer_client.StoreUnavailableError):
        trainer_client.StoreClientSync.connect(address, timeout=1.0)
    assert warnings(caplog) == [
        f"paramserver: waiting up to {seconds} s for the store daemon at {address}, which does not answer"
        for seconds in (0, 1)
    ]
