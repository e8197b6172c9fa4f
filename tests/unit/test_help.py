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


def test_the_verbs_that_both_commands_have_name_the_one_that_was_called() -> None:
    for app, name in ((paramserver.cli.app, "paramserver"), (paramserver.admin.cli.app, "paramserver-admin")):
        for verb in ("export", "import"):
            wrong = CliRunner().invoke(app, [verb, "--nonsense"])
            assert wrong.exit_code == 2 and wrong.output.startswith(f"Usage: {name} {verb} [OPTIONS]"), wrong.output
            refused = CliRunner().invoke(app, [verb, "x", "--job", "x"], env={"PARAMSERVER_ADDRESS": ""})
            assert refused.output.startswith(f"{name}: give the daemon's address"), refused.output


def test_an_address_that_is_none_and_a_directory_that_is_missing_are_refused_with_the_form() -> None:
    admin = paramserver.admin.cli.app
    for address in ("nonsense", "host:", "host:0", ":7411"):
        refused = CliRunner().invoke(admin, ["tiers", "--address", address])
        assert (refused.exit_code, refused.output) == (
            2,
            f"paramserver-admin: address {address!r}: write 'unix:/path/paramserver.sock' or 'host:port'\n",
        )
    for arguments in ([], ["/a", "--state-dir", "/a"]):
        refused = CliRunner().invoke(admin, ["fsck", *arguments])
        assert refused.exit_code == 2 and "give the state directory once" in refused.output
