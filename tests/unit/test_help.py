"""The help texts of the command lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import paramserver.admin.cli
import paramserver.cli
import trainer_client.exchange.cli
import trainer_client.exchange.import_cli
import trainer_client.launch.cli
import trainer_client.plan.cli


@pytest.mark.parametrize(
    ("verb", "word"),
    [
        ("serve", "[none]"),
        ("serve", "[console]"),
        ("certs", "[localhost, 127.0.0.1, ::1]"),
        ("certs", "[client]"),
        ("tokens add", "[never]"),
    ],
)
def test_a_default_in_brackets_is_shown(verb: str, word: str) -> None:
    result = CliRunner().invoke(paramserver.cli.app, [*verb.split(), "--help"])

    assert result.exit_code == 0
    assert word in " ".join(result.output.split())


@pytest.mark.parametrize(
    "module",
    [
        paramserver.admin.cli,
        paramserver.cli,
        trainer_client.exchange.cli,
        trainer_client.exchange.import_cli,
        trainer_client.launch.cli,
        trainer_client.plan.cli,
    ],
)
def test_no_help_text_is_read_as_markup(module: object) -> None:
    app: typer.Typer = vars(module)["app"]

    assert app.rich_markup_mode is None


def test_arguments_have_names_in_capitals() -> None:
    """The page is made from the commands, and `tests/unit/test_docs_site.py` compares both."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
    arguments = re.findall(r"^paramserver.*\[OPTIONS\](.*)$", page.read_text(), flags=re.MULTILINE)

    assert len(arguments) > 30
    assert [names for names in arguments if names != names.upper()] == []


def test_each_verb_of_an_operator_has_a_whole_line_in_a_terminal_of_80_columns() -> None:
    result = CliRunner().invoke(paramserver.admin.cli.app, ["--help"], env={"COLUMNS": "80"}, terminal_width=80)

    lines = result.output.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) == len(paramserver.admin.cli.app.registered_commands)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []
