"""A user's files and folders may have the names of this project's packages. The daemon and both commands never import
them, and a trainer that would find them first ends with an error that names them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.support.forked import ROOT

COMMANDS = {
    "the command": [str(Path(sys.executable).with_name("paramserver"))],
    "python -m": [sys.executable, "-m", "paramserver"],
    "python -P -m": [sys.executable, "-P", "-m", "paramserver"],
    "python -I -m": [sys.executable, "-I", "-m", "paramserver"],
    "the file": [sys.executable, "-P", str(ROOT / "paramserver" / "__main__.py")],
}

# This program is a trainer. The tests write it to a directory of its own.
TRAIN = """
import sys, torch, trainer_client
nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    "paramserver": {"host_budget": "64MiB", "nvme_budget": "256MiB"},
}
with trainer_client.initialize(model=torch.nn.Linear(4, 1), config=config)[0] as engine:
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
import storage
assert storage.__file__ is None or storage.MINE
print("trained")
"""


FOREIGN = 'raise RuntimeError("this is not the engine")\n'


def write(path: Path, text: str = "MINE = True\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run(
    command: list[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_storage_py_in_the_working_directory_and_on_the_path_is_not_the_daemons(tmp_path: Path, command: str) -> None:
    write(tmp_path / "storage.py", FOREIGN)
    write(tmp_path / "path" / "storage" / "__init__.py", FOREIGN)
    # The import of `storage` comes before the check of the configuration, which refuses this host budget.
    options = ["serve", "--state-dir", str(tmp_path / "state"), "--host-budget", "lots"]
    environment = {"PYTHONPATH": f"{tmp_path / 'path'}:{tmp_path}:"}
    ended = run([*COMMANDS[command], *options], tmp_path, environment)
    assert ended.returncode == 2 and "host_budget = 'lots'" in ended.stderr, ended.stderr


def test_the_admin_tool_imports_its_own_packages(tmp_path: Path) -> None:
    write(tmp_path / "storage.py")
    command = [str(Path(sys.executable).with_name("paramserver-admin")), "tiers", "--address", f"unix:{tmp_path}/no"]
    ended = run(command, tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 1 and "no daemon answers at unix:" in ended.stderr, ended.stderr


def test_a_daemon_run_by_its_file_does_not_know_a_foreign_paramserver(tmp_path: Path) -> None:
    write(tmp_path / "paramserver.py", FOREIGN)
    ended = run([*COMMANDS["the file"], "--version"], tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "paramserver"), ended.stderr


@pytest.mark.parametrize("name", ["storage.py", "storage/__init__.py"])
def test_what_was_imported_before_is_named(tmp_path: Path, name: str) -> None:
    foreign = write(tmp_path / name)
    write(tmp_path / "sitecustomize.py", "import storage\n")
    ended = run([*COMMANDS["the command"], "--version"], ROOT, {"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith(f"paramserver: {foreign} was imported in place of the package 'storage' in {ROOT}")


def test_a_trainer_and_its_daemon_work_beside_them(tmp_path: Path) -> None:
    """The daemon imports nothing from the working directory, and a trainer may have a package `storage` of its own."""
    here, path = tmp_path / "here", tmp_path / "path"
    write(here / "storage.py")
    # The trainer imports neither folder, because its script is elsewhere. A daemon that searched the working directory
    # first would import these files and fail.
    for name in ("structlog", "uvloop", "typer"):
        write(here / f"{name}.py", FOREIGN)
    (path / "storage").mkdir(parents=True)
    script = write(tmp_path / "script" / "train.py", TRAIN)
    ended = run([sys.executable, str(script), "state"], here, {"PYTHONPATH": str(path)})
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert (here / "state" / "catalog.sqlite").exists()


@pytest.mark.parametrize("name", ["paramserver.py", "paramserver/__init__.py", "paramserver/state.json"])
def test_a_trainer_that_finds_a_foreign_paramserver_names_it(tmp_path: Path, name: str) -> None:
    foreign = write(tmp_path / name)
    script = write(tmp_path / "train.py", "import trainer_client\n")
    ended = run([sys.executable, str(script)], ROOT)
    place = foreign.parent if name.endswith(".json") else foreign
    assert ended.returncode == 1
    assert f"ImportError: {place} is found in place of the package 'paramserver' in {ROOT}: rename" in ended.stderr
