"""The program that finds the machine's Python interpreters and runs make with each of them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import pythons

ROOT = Path(__file__).parents[2]
# The interpreter that the environment of this process was made with.
ORIGINAL: str = getattr(sys, "_base_executable", sys.executable)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ensurepip") is None,
    reason="this Python cannot make environments, so it is not to be found",
)


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def test_the_versions_that_are_tried_begin_with_the_oldest_that_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = min(pythons.supported())
    assert project["requires-python"] == ">={}.{}".format(*oldest)
    assert f"Python >= {oldest[0]}.{oldest[1]}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_interpreters_are_found_on_the_path_and_where_pyenv_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = script(tmp_path / "a directory" / "python3", f'exec "{ORIGINAL}" "$@"')
    of_pyenv = script(tmp_path / "pyenv" / "versions" / "1.2.3" / "bin" / "python3", f'exec "{ORIGINAL}" "$@"')
    shim = script(tmp_path / "pyenv" / "shims" / "python3", "exit 1")
    monkeypatch.setenv("PATH", f"{shim.parent}{os.pathsep}{on_path.parent}{os.pathsep}{tmp_path / 'no directory'}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))

    candidates = list(pythons.candidates())

    assert candidates == [str(on_path), str(of_pyenv)]
    # Both interpreters have the same version, so the program takes the one that comes first on the PATH.
    assert pythons.find(candidates) == [pythons.Python(sys.version_info[:3], str(on_path))]


def test_what_cannot_make_an_environment_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = tmp_path / "environment"
    subprocess.run([ORIGINAL, "-m", "venv", "--without-pip", str(inside)], check=True)
    no_venv = script(tmp_path / "python3", "echo \"No module named 'ensurepip'\" >&2", "exit 1")
    too_old = script(tmp_path / "python3.9", "echo 3.9.18")

    assert pythons.find([str(inside / "bin" / "python3"), str(no_venv), str(too_old), str(tmp_path / "absent")]) == []

    assert f"{no_venv} is left out: No module named 'ensurepip'" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "status", "ending"), [("help", 0, "passed"), ("no-such-target", 1, "FAILED")])
def test_make_runs_with_each_and_the_last_lines_say_how_it_ended(target: str, status: int, ending: str) -> None:
    command = [sys.executable, "-m", "tests.pythons", target, "--with", ORIGINAL]
    # A make that runs the tests sets these variables, and closes its job server to the processes of its children.
    environment = os.environ | {"MAKEFLAGS": " -j2 --jobserver-auth=98,99", "MAKELEVEL": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == status, done.stderr
    assert re.search(rf"^Python [\d.]+, {re.escape(ORIGINAL)}: {ending}", done.stdout.splitlines()[-1])
    assert "jobserver" not in done.stderr
    assert ("make demo" in done.stdout) == (target == "help")
