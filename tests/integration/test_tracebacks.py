"""A user's traceback ends in one error, which says all. No error of gRPC or of Python's library stands beside it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.daemon import Daemon
from trainer_client.errors import TrainerClientError

NVME = {"device": "nvme"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A daemon with a job, whose engine another run has open, and a client of it."""

    daemon: Daemon
    client: trainer_client.StoreClientSync
    directory: Path

    def config(self, **section: Any) -> dict[str, Any]:
        """Return a config for this daemon."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME},
            "paramserver": {"address": self.daemon.address, "reattach_timeout_seconds": 0, **section},
        }

    def open(self, width: int = 2, **section: Any) -> trainer_client.Engine:
        """Return an engine for a model of one layer."""
        return trainer_client.initialize(model=nn.Linear(width, width), config=self.config(**section))[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "broken.json").write_text("{")
    with (
        Daemon(directory / "state", {"host_budget": "16MiB"}) as daemon,
        trainer_client.StoreClientSync.connect(daemon.address) as client,
    ):
        site = Site(daemon=daemon, client=client, directory=directory)
        site.open().close()
        with site.open(job="busy"):
            yield site


def told(action: Callable[[], object]) -> str:
    """Return the traceback of the error of this library that `action` raises, as Python prints it."""
    with pytest.raises(TrainerClientError) as caught:
        action()
    return "".join(traceback.format_exception(caught.value))


ACTIONS: dict[str, Callable[[Site], object]] = {
    "a job that another run has": lambda site: site.open(job="busy"),
    "a job of another model": lambda site: site.open(width=3),
    "a job that is not there": lambda site: site.open(job="new", resume="must"),
    "a job that is there": lambda site: site.open(resume="never"),
    "a host budget that is too small": lambda site: site.open(width=2000, job="large"),
    "a daemon that cannot start": lambda site: trainer_client.initialize(
        model=nn.Linear(1, 1),
        config=site.config(address=None, state_dir=str(site.directory / "broken.json")),
    ),
    "a config that is not JSON": lambda site: trainer_client.initialize(
        model=nn.Linear(1, 1), config=str(site.directory / "broken.json")
    ),
    "a rate that is no number": lambda site: trainer_client.initialize(
        model=nn.Linear(1, 1), config=site.config() | {"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}
    ),
    "a client's job that is not there": lambda site: site.client.read("new"),
    "a client's job that another run has": lambda site: site.client.open("busy", {"weight": torch.zeros(2)}),
    "a client's address": lambda site: trainer_client.StoreClientSync.connect("nonsense"),
    "a client's daemon": lambda site: trainer_client.StoreClientSync.connect("unix:/nowhere.sock", timeout=0.1),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_refusal_is_the_only_error_of_its_traceback(site: Site, name: str) -> None:
    text = told(lambda: ACTIONS[name](site))
    assert text.count("Traceback (most recent call last)") == 1, text


def test_the_end_of_a_daemon_is_the_only_error_of_the_traceback_of_a_step_and_of_a_read(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "state", {"host_budget": "16MiB"}) as daemon,
        trainer_client.StoreClientSync.connect(daemon.address) as client,
    ):
        site = Site(daemon=daemon, client=client, directory=tmp_path)
        engine = site.open()

        def train() -> None:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            engine.wait_for_commit()

        train()
        with client.read("default", step=1) as reader:
            daemon.kill()
            for text in (told(train), told(lambda: reader.get("weight", timeout=0.5))):
                assert text.count("Traceback (most recent call last)") == 1, text
        engine.close()
