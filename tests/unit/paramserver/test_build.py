"""The build tells installations apart by their code alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from paramserver import __version__, cli
from paramserver.admin import cli as admin_cli
from paramserver.build import read_build, read_commit

ROOT = Path(__file__).parents[3]


def test_a_copy_of_the_code_has_the_same_build_and_any_change_another_one(tmp_path: Path) -> None:
    for package in ("paramserver", "storage", "trainer_client"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    build = read_build()
    assert read_build(tmp_path) == build
    page = tmp_path / "paramserver" / "page" / "page.js"
    page.write_text(page.read_text() + "\n")
    changed = read_build(tmp_path)
    page.rename(page.with_name("other.js"))
    renamed = read_build(tmp_path)
    keys = tmp_path / "trainer_client" / "config" / "deepspeed_keys.toml"
    keys.write_text(keys.read_text() + "\n")
    assert len({build, changed, renamed, read_build(tmp_path)}) == 4


def test_a_commit_is_carried_or_asked_for_and_never_that_of_another_project(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        asked = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()

    assert read_commit(tmp_path) == "unknown"
    git("init")
    assert read_commit(tmp_path) == "unknown"
    git("commit", "--allow-empty", "--message=first")
    (inside := tmp_path / "site-packages" / "paramserver").mkdir(parents=True)
    assert read_commit(tmp_path) == git("rev-parse", "HEAD")
    assert read_commit(inside.parent) == "unknown"
    (inside / "commit.txt").write_text(f"{'1' * 40}\n")
    assert read_commit(inside.parent) == "1" * 40


def test_both_commands_show_version_commit_and_build() -> None:
    for app, name in ((cli.app, "paramserver"), (admin_cli.app, "paramserver-admin")):
        shown = CliRunner().invoke(app, ["--version"])
        expected = f"{name} {__version__}, commit {read_commit()}, build {read_build()}\n"
        assert (shown.exit_code, shown.output) == (0, expected)
