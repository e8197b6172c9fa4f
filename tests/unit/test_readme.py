"""The README and the pages on the daemon and the directories are true: the example runs and resumes, and the tables
list the keys, commands and directories that there are. The README stays short enough to be read at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from paramserver.admin import cli as admin_cli
from paramserver.config import DaemonConfig, load_config
from tests.integration.support.daemon import MIB, STATED_OVERHEADS
from tests.unit.test_docs import FOLDERS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DAEMON = (ROOT / "docs" / "daemon.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# The README says what the project is, why, and where to read on. What is longer belongs in a page of docs.
MOST_LINES = 150


def section(heading: str, page: str) -> str:
    """Return the text under a heading of a page, up to the next heading of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    after = page.split(f"\n{heading}\n", maxsplit=1)[1]
    return re.split(rf"^#{{1,{level}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


def keys_of_table(text: str) -> list[str]:
    """Return the cells of the first column that are code."""
    return re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE)


def run_example(directory: Path) -> tuple[int, int, float]:
    """Run the README's training loop in `directory`, with a line added that prints the results.

    Returns:
        The resumed step, the number of steps, and the last loss.
    """
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = directory / "example.py"
    report = 'print(engine.resumed_step, engine.global_steps, float(globals().get("loss", "nan")))'
    script.write_text(f"{example}{report}\n")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "PARAMSERVER_ADDRESS")}
    result = subprocess.run(
        [sys.executable, script.name],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    resumed, steps, loss = result.stdout.splitlines()[-1].split()
    return int(resumed), int(steps), float(loss)


def test_the_example_trains_and_its_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    resumed, steps, loss = run_example(tmp_path)

    assert (resumed, steps) == (0, 50)
    assert loss < 1 / 64, "what it would have without looking at the inputs"
    assert run_example(tmp_path)[:2] == (50, 50)


def test_the_daemon_table_lists_the_keys_of_its_config() -> None:
    assert sorted(keys_of_table(section("## Configuration", DAEMON))) == sorted(DaemonConfig.model_fields)


def test_the_config_file_that_the_daemons_page_shows_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DAEMON, flags=re.DOTALL)
    path = tmp_path / "paramserver.toml"
    path.write_text(example)

    assert load_config(path, {}).host_budget == 64 << 30


def test_the_table_of_directories_names_each_of_them() -> None:
    """The packages in them are rooms, which tests/unit/test_docs.py compares."""
    assert sorted(keys_of_table(section("## The directories", ARCHITECTURE))) == sorted([*FOLDERS, "deploy"])


def test_the_overhead_of_the_daemon_is_stated_as_the_tests_hold_it() -> None:
    rows = re.findall(r"^\| (\w+) build \|(.*)\|$", section("## Memory and disk it takes", DAEMON), flags=re.MULTILINE)
    limits = {build: [int(figure) * MIB for figure in re.findall(r"(\d+) MiB", cells)] for build, cells in rows}

    assert limits == {build: [at.private_bytes, at.mapped_bytes] for build, at in STATED_OVERHEADS.items()}


def test_the_admin_commands_of_the_picture_exist() -> None:
    (verbs,) = re.findall(r"paramserver-admin ([a-z |-]+)", section("## The parts", README))

    assert len(verbs.split(" | ")) > 3
    for verb in verbs.split(" | "):
        assert CliRunner().invoke(admin_cli.app, [verb, "--help"]).exit_code == 0


def test_the_readme_is_short_and_begins_with_figures_that_have_a_page_and_a_date() -> None:
    rows = re.findall(r"^\| \*\*.*", section("## Why", README), flags=re.MULTILINE)

    assert README.count("\n") <= MOST_LINES
    assert len(rows) == 4
    for row in rows:
        measured, where = row.strip("| ").split(" | ")[1:]
        assert re.search(r"\d", measured), row
        assert "](" in where, row
        assert re.search(r"20\d\d-\d\d-\d\d", where), row
