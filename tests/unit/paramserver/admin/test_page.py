"""The page on the admin tool lists its verbs, messages, exit statuses and kinds of events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.console import Group
from typer.testing import CliRunner

from paramserver.admin import tables
from paramserver.admin.cli import app
from paramserver.admin.exit_codes import ExitCode
from paramserver.events import EventKind
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.unit.test_docs import rows

PAGE = Path(__file__).parents[4] / "docs/admin.md"
VERBS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def first_cells(heading: str) -> list[str]:
    return [first.strip("`") for first, *_ in rows(PAGE, heading)[2:]]


def test_the_table_lists_the_verbs_and_messages_that_there_are() -> None:
    table = rows(PAGE, "## The verbs")[2:]
    assert sorted(first.strip("`") for first, *_ in table) == VERBS
    messages = [last.strip("`") for *_, last in table if last.startswith("`")]
    assert len(messages) == len(VERBS) - 9
    assert [message for message in messages if message not in admin_pb.DESCRIPTOR.message_types_by_name] == []


def test_the_tables_list_the_exit_statuses_and_the_kinds_of_events() -> None:
    assert first_cells("## For programs") == [str(int(code)) for code in ExitCode]
    assert first_cells("## Events") == [kind.value for kind in EventKind]


def test_the_captured_tables_have_the_columns_that_the_tool_prints() -> None:
    shown: list[Any] = [
        tables.tiers_table(admin_pb.GetTiersResponse()),
        tables.devices_table([]),
        tables.jobs_table([]),
        tables.steps_table("", admin_pb.ListStepsResponse()),
    ]
    # Some have lines below them.
    printed = [each.renderables[0] if isinstance(each, Group) else each for each in shown]
    captured = re.findall(r"^┃ (.*) ┃$", PAGE.read_text(), flags=re.MULTILINE)

    assert [re.split(r" *┃ *", line.strip()) for line in captured] == [
        [str(column.header) for column in table.columns] for table in printed
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_each_verb_has_examples_that_call_it(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    examples = result.output.split("Examples:\n")[1].splitlines()
    assert examples
    assert all(re.match(rf" +paramserver-admin {verb}\b", line) for line in examples if line.strip())
