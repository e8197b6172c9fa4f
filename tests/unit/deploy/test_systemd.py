"""systemd accepts the unit, the daemon accepts its configuration, and tells systemd when it serves."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paramserver.config import ENVIRONMENT_PREFIX, load_config
from paramserver.process.manager import tell_manager
from tests.integration.support.daemon import Daemon

DIRECTORY = Path(__file__).parents[3] / "deploy" / "systemd"
UNIT = DIRECTORY / "paramserver@.service"
PROGRAM = "/opt/paramserver/bin/paramserver"


def test_systemd_accepts_the_unit_and_finds_little_exposed(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    # The program of the unit is not installed here, so another one that exists takes its place.
    text = UNIT.read_text()
    assert PROGRAM in text
    instance = tmp_path / "paramserver@root.service"
    instance.write_text(text.replace(PROGRAM, sys.executable))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", instance], capture_output=True, text=True, timeout=60, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", instance],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr


def of_environment() -> dict[str, str]:
    return dict(re.findall(r"^Environment=(\w+)=(.*)$", UNIT.read_text(), flags=re.MULTILINE))


def settings() -> dict[str, str]:
    """Return the settings of the unit; of those that occur several times, the last one."""
    return dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), flags=re.MULTILINE))


def test_the_directory_of_the_socket_is_the_same_after_a_restart() -> None:
    """A container has the directory itself mounted, and would look for the next socket in one that was removed."""
    socket_path = load_config(DIRECTORY / "paramserver.toml", {}, of_environment()).socket_path
    assert f"/run/{settings()['RuntimeDirectory']}" == str(socket_path.parent)
    assert settings()["RuntimeDirectoryPreserve"] == "yes"


def test_its_directories_are_for_its_user_alone() -> None:
    """Those that the daemon makes are, too. systemd makes them with mode 0755 unless the unit says otherwise."""
    modes = [settings().get(f"{kind}DirectoryMode") for kind in ("Runtime", "State")]
    assert modes == ["0700", "0700"]


def test_the_runbooks_say_how_to_go_on_where_systemd_has_given_up() -> None:
    """systemd counts starts by hand, too, and refuses them for the rest of the interval."""
    assert int(settings()["StartLimitBurst"]) == 5 and int(settings()["StartLimitIntervalSec"]) == 600
    runbooks = (DIRECTORY.parents[1] / "docs" / "runbooks.md").read_text()
    limits = [part for part in runbooks.split("\n\n") if "five attempts" in part or "sixth start within ten" in part]
    assert len(limits) == 2 and all("`systemctl reset-failed paramserver@alice`" in part for part in limits)


def test_it_names_no_page_that_no_installation_has() -> None:
    """The package installs no pages, so `systemctl status` would show a file that is not there."""
    assert "Documentation" not in settings()


def test_the_daemon_accepts_file_and_variables_of_the_unit() -> None:
    variables = of_environment()
    assert all(name.startswith(ENVIRONMENT_PREFIX) for name in variables)
    config = load_config(DIRECTORY / "paramserver.toml", {}, variables)

    assert config.socket_path == Path("/run/paramserver/%i/paramserver.sock")
    commented = re.sub(r"^# (?=\w+ = )", "", (DIRECTORY / "paramserver.toml").read_text(), flags=re.MULTILINE)
    path_keys = tomllib.loads(commented)
    assert {"nvme_dirs", "lock_memory"} < set(path_keys)


def test_the_daemon_tells_when_it_serves_and_when_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with Daemon(tmp_path / "state") as daemon:
            assert manager.recv(100) == b"READY=1"
            assert daemon.is_serving()
            assert daemon.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_a_manager_that_is_away_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{os.getpid()}-nothing-is-there")
    tell_manager("READY=1")
    assert "cannot be told READY=1" in caplog.text
    monkeypatch.delenv("NOTIFY_SOCKET")
    tell_manager("READY=1")
