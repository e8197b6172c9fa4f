"""A state directory works whatever its path: also if it is longer than a socket's path may be, or has letters that a
URI quotes."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import trainer_client
from paramserver.admin.cli import app
from tests.integration.support.daemon import Daemon, run_serve
from trainer_client import LocalDaemonError, StoreClientSync

# SQLite cannot open the catalog in a longer directory.
LONGEST = 489


def directory_of(parent: Path, length: int, end: str = "e") -> Path:
    """Return the path of a directory, not made yet, that has `length` bytes and ends with `end`. Make its parent."""
    path = str(parent)
    while length - len(path) > 200:
        path += "/" + "d" * 150
    missing = length - len(path) - len(end) - 1
    if missing < 0:
        pytest.skip(f"the temporary directory's path has {len(str(parent))} bytes")
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(f"{path}/{'x' * missing}{end}")


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short path."""
    return tmp_path_factory.mktemp("p")


def put(address: str, value: float) -> None:
    """Commit a step in which the weight is `value`, through shared memory."""
    with StoreClientSync.connect(address) as client, client.open("job", {"w": torch.zeros(1000)}) as job:
        assert client.maps_memory
        job.put({"w": torch.full((1000,), value)})
        job.commit()


def got(address: str, *, prefer_streams: bool = False) -> float:
    """Return the weight of the newest step."""
    with StoreClientSync.connect(address, prefer_streams=prefer_streams) as client, client.read("job") as reader:
        weight = reader.get("w")
        assert bool((weight == weight[0]).all())
        return float(weight[0])


# At the first length the kernel takes the paths of both sockets, at the second one that of the arena's is too long for
# it, and at the others both are.
@pytest.mark.parametrize("length", [84, 85, 120, LONGEST])
def test_a_daemon_serves_every_client_in_a_long_directory_and_after_a_restart(short: Path, length: int) -> None:
    state_dir = directory_of(short, length)
    with Daemon(state_dir) as daemon:
        assert len(str(state_dir)) == length and daemon.address == f"unix:{state_dir}/paramserver.sock"
        sockets = [daemon.socket, Path(f"{daemon.socket}.arena")]
        assert all(path.is_socket() and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in sockets)
        put(daemon.address, 1.0)
        assert got(daemon.address) == got(f"unix://{state_dir}/paramserver.sock", prefer_streams=True) == 1.0
        shown = CliRunner().invoke(app, ["jobs", "--json", "--address", daemon.address])
        assert shown.exit_code == 0 and [job["name"] for job in json.loads(shown.output)["jobs"]] == ["job"]
        daemon.kill()
    with Daemon(state_dir) as daemon:
        assert got(daemon.address) == 1.0
        put(daemon.address, 2.0)
        second = run_serve("--state-dir", str(state_dir), "--host-budget", "16MiB")
        assert second.returncode == 1 and f"{state_dir} is in use by the daemon" in second.stderr
        assert daemon.stop() == 0
        assert not any(path.exists() for path in sockets)
    nowhere = CliRunner().invoke(app, ["jobs", "--address", daemon.address])
    assert nowhere.exit_code == 1 and f"no daemon answers at unix:{state_dir}/" in nowhere.output
    assert "/proc/self" not in nowhere.output


def test_two_daemons_whose_directories_differ_only_at_the_end(short: Path) -> None:
    one, two = directory_of(short, 300, "one"), directory_of(short, 300, "two")
    with Daemon(one) as first, Daemon(two) as second:
        put(first.address, 1.0)
        put(second.address, 2.0)
        assert (got(first.address), got(second.address)) == (1.0, 2.0)


def test_a_directory_that_the_catalog_cannot_be_in_is_named_with_the_limit(short: Path) -> None:
    state_dir = directory_of(short, 1000)
    ended = run_serve("--state-dir", str(state_dir), "--host-budget", "16MiB")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"{state_dir}/catalog.sqlite has a path of 1015 bytes" in ended.stderr
    assert f"choose a state directory of at most {LONGEST} bytes" in ended.stderr


def begun(state_dir: Path) -> trainer_client.Engine:
    """Return the engine of a small job that starts a daemon of its own in the directory."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(state_dir)}},
        "paramserver": {"host_budget": "64MiB", "nvme_budget": "256MiB"},
    }
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    return trainer_client.initialize(model=model, config=config)[0]


def train(engine: trainer_client.Engine, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    engine.wait_for_commit()


def lose_daemon(engine: trainer_client.Engine, state_dir: Path) -> None:
    """Kill the daemon of a run, which must go on with the next one."""
    os.kill(int((state_dir / "lock").read_text()), signal.SIGKILL)
    train(engine, 1)
    assert len(engine.daemon_restarts) == 1


def check_outlived_and_resumed(state_dir: Path) -> None:
    """Train with a daemon in the directory, outlive it, and resume with the next one."""
    with begun(state_dir) as engine:
        assert engine.data_plane == "arena"
        train(engine, 2)
        shown = CliRunner().invoke(app, ["jobs", "--json", "--address", f"unix:{state_dir}/paramserver.sock"])
        assert [job["name"] for job in json.loads(shown.output)["jobs"]] == ["default"]
        lose_daemon(engine, state_dir)
    assert not list(state_dir.glob("*.sock*"))
    with begun(state_dir) as engine:
        assert engine.global_steps == 3 and engine.data_plane == "arena"
        train(engine, 1)


def test_a_trainer_outlives_and_resumes_its_daemon_in_a_directory_with_letters_that_a_uri_quotes(short: Path) -> None:
    state_dir = short / "50%41 of what? a\N{SNOWMAN}b #1"
    # A longer path is not quoted, because the kernel would not take it as the address of a socket.
    if len(os.fsencode(state_dir / "paramserver.sock.arena")) > 107:
        pytest.skip(f"the temporary directory's path has {len(str(short))} bytes")
    check_outlived_and_resumed(state_dir)
    assert (state_dir / "catalog.sqlite").exists()


def test_a_trainer_outlives_and_resumes_its_daemon_whose_sockets_have_long_paths(short: Path) -> None:
    check_outlived_and_resumed(directory_of(short, 100))


def test_the_daemons_of_two_trainers_whose_long_directories_differ_only_at_the_end(short: Path) -> None:
    """One of the two daemons is lost, and both jobs are resumed."""
    one, two = directory_of(short, 300, "one"), directory_of(short, 300, "two")
    with begun(one) as first, begun(two) as second:
        assert first.data_plane == second.data_plane == "arena"
        train(first, 1)
        train(second, 3)
        lose_daemon(first, one)
    assert not [*one.glob("*.sock*"), *two.glob("*.sock*")]
    with begun(two) as second, begun(one) as first:
        assert (first.global_steps, second.global_steps) == (2, 3)
        train(first, 1)
        train(second, 1)


def test_a_trainer_is_refused_a_directory_that_the_catalog_cannot_be_in(short: Path) -> None:
    with pytest.raises(LocalDaemonError, match=f"choose a state directory of at most {LONGEST} bytes"):
        begun(directory_of(short, LONGEST + 1))
