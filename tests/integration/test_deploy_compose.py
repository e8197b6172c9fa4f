"""The compose file's services work together: its commands and variables, as processes instead of containers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.support.forked import ROOT, Forked
from tests.integration.support.ranks import free_port
from tests.unit.deploy.test_container import COMPOSE, services, variables
from trainer_client.client.transport.channel import wait_until_serving

NODES = (0, 1)
SECONDS = 240.0


def placed(text: str, tmp_path: Path, node: int, port: int) -> str:
    """Return a word of a command, or a variable, with the paths and names of this test for those of a container."""
    replaced = {
        "/run/paramserver": str(tmp_path / f"run-{node}"),
        "/var/lib/paramserver": str(tmp_path / f"state-{node}"),
        "/etc/paramserver/paramserver.toml": str(COMPOSE.with_name("paramserver.toml")),
        "=trainer-0": "=127.0.0.1",
        "29500": str(port),
    }
    for of_container, here in replaced.items():
        text = text.replace(of_container, here)
    return text


def environment(name: str, stage: str, tmp_path: Path, node: int, port: int) -> Mapping[str, str]:
    of_service = services()[name].get("environment", {})
    chosen = {key: value for key, value in variables(stage).items() if key.startswith("PARAMSERVER_")} | of_service
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(("PARAMSERVER_", "RANK"))}
    return surroundings | {key: placed(value, tmp_path, node, port) for key, value in chosen.items()}


@contextmanager
def daemons(tmp_path: Path) -> Iterator[list[Forked]]:
    """Run the services of the daemons, with smaller budgets."""
    running: list[Forked] = []
    try:
        for node in NODES:
            (tmp_path / f"run-{node}").mkdir(mode=0o700)
            smaller = {"PARAMSERVER_SERVE_HOST_BUDGET": "32MiB", "PARAMSERVER_SERVE_NVME_BUDGET": "256MiB"}
            command = [placed(word, tmp_path, node, 0) for word in services()[f"store-{node}"]["command"]]
            variables_of = dict(environment(f"store-{node}", "daemon", tmp_path, node, 0)) | smaller
            running.append(
                Forked("paramserver.cli", command, environment=variables_of, log=tmp_path / f"store-{node}.log")
            )
        for node in NODES:
            wait_until_serving(f"unix:{tmp_path}/run-{node}/paramserver.sock", SECONDS)
        yield running
    finally:
        for daemon in running:
            daemon.kill()
            daemon.wait()


@pytest.mark.timeout(300)
def test_two_trainers_train_one_job_each_through_the_daemon_of_its_node(tmp_path: Path) -> None:
    port = free_port()
    script = f"{ROOT}/tests/integration/support/deployed_rank.py"
    with daemons(tmp_path) as stores:
        ranks = []
        for node in NODES:
            words = [placed(word, tmp_path, node, port) for word in services()[f"trainer-{node}"]["command"]]
            at = words.index("/opt/paramserver/examples/train_gpt2.py")
            own = dict(environment(f"trainer-{node}", "trainer", tmp_path, node, port)) | {"PYTHONPATH": str(ROOT)}
            ranks.append(
                Forked(
                    "paramserver.cli",
                    ["launch", *words[:at], script, str(tmp_path), "3"],
                    environment=own,
                    log=tmp_path / f"trainer-{node}.log",
                )
            )
        deadline = time.monotonic() + SECONDS
        for node, rank in zip(NODES, ranks, strict=True):
            assert rank.wait(deadline - time.monotonic()) == 0, (tmp_path / f"trainer-{node}.log").read_text()
        found = [json.loads((tmp_path / f"{node}.json").read_text()) for node in NODES]
        for store in stores:
            store.send_signal(signal.SIGTERM)
            assert store.wait(60) == 0

    assert [(facts["steps"], facts["data_plane"]) for facts in found] == [(3, "arena"), (3, "arena")]
    assert found[0]["weights"] == found[1]["weights"]
    assert [facts["address"] for facts in found] == [f"unix:{tmp_path}/run-{node}/paramserver.sock" for node in NODES]
    # Each node keeps its part of the state, and no socket.
    for node in NODES:
        assert list((tmp_path / f"run-{node}").iterdir()) == []
        assert (tmp_path / f"state-{node}" / "lock").exists()
