"""JSON and TOML that are nested a hundred thousand times, from a file or from a store, are errors like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from paramserver.config import load_config
from paramserver.errors import ConfigError as DaemonConfigError
from paramserver.security.tokens import read_entries
from storage.base.errors import DeviceError
from storage.jobs.directories import LABEL as LABEL_OF_DATA
from storage.jobs.directories import adopt
from tests.unit.storage.builders import opened
from trainer_client.config.config_file import read_config_file
from trainer_client.copying.backup import BackupStep
from trainer_client.errors import BackupError, CheckpointError, ClientStateError, ConfigError
from trainer_client.launch.store import OwnDaemon
from trainer_client.training.run import client_state
from trainer_client.training.run.checkpoint_files import CheckpointManifest

NESTED = "[" * 100_000
TOML = f"key = {NESTED}"


def state_of(value: str) -> bytes:
    return f'{{"format": {client_state.FORMAT}, "state": {{"x": {value}}}}}'.encode()


def backup(directory: Path, label: str, manifest: str) -> BackupStep:
    (directory / "steps").mkdir()
    (directory / "backup.json").write_text(label)
    digest = xxhash.xxh3_128_hexdigest(manifest.encode())
    (directory / "steps" / "0000001-1.json").write_text(f"{manifest}\n{digest}\n")
    return BackupStep(str(directory), "job")


LABEL = json.dumps({"format": "paramserver backup", "version": 1, "job": "job"})
READ: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "daemon.toml": (DaemonConfigError, lambda path: load_config(path, {})),
    "tokens.toml": (DaemonConfigError, read_entries),
    "variable": (DaemonConfigError, lambda _: load_config(None, {}, {"PARAMSERVER_SERVE_QUOTAS": f"{{a = {NESTED}}}"})),
    "launch.toml": (ConfigError, lambda path: OwnDaemon.of(path, {})),
    "config.json": (ConfigError, read_config_file),
    "manifest.json": (CheckpointError, lambda path: CheckpointManifest.from_json(path.read_text(), str(path))),
    "client state": (ClientStateError, lambda _: client_state.decode(state_of(NESTED))),
    "nested client state": (ClientStateError, lambda _: client_state.decode(state_of("[" * 900 + "]" * 900))),
    "label": (BackupError, lambda path: backup(path.parent, NESTED, "{}")),
    "manifest": (BackupError, lambda path: backup(path.parent, LABEL, NESTED)),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_nested_too_deeply_is_refused_by_name(tmp_path: Path, name: str) -> None:
    error, read = READ[name]
    path = tmp_path / name
    path.write_text(TOML if name.endswith(".toml") else NESTED)
    with pytest.raises(error):
        read(path)


async def test_the_label_of_a_data_directory_is_refused_by_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with opened(tmp_path / "state", nvme_dirs=(data,)):
        pass
    (data / LABEL_OF_DATA).write_text(NESTED)
    with pytest.raises(DeviceError, match=f"cannot read .*{LABEL_OF_DATA}"):
        await adopt(tmp_path / "state", [data])
