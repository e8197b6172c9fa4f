"""Text and tables for people, and JSON for programs. What the tables show is in tables.py.

Names come from clients, so every cell, title and line goes through `text`. This module must never pass a plain string
to rich, because rich would interpret markup and emoji codes in it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paramserver.contract.printable import printable

_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def print_json(values: Any) -> None:
    """Print values as one line of JSON.

    The line is flushed, so that a program that reads from a pipe gets it at once, and an output that is closed or full
    is an error here and not at the end of the interpreter.
    """
    print(json.dumps(values), flush=True)


def to_json(message: Message) -> str:
    """Return a message as one line of JSON; see `values_of`."""
    return json.dumps(values_of(message))


def values_of(message: Message) -> Any:
    """Return a message as values for JSON: the proto's field names, unset fields too, 64-bit integers as numbers."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _numbers(fields, message.DESCRIPTOR)


def text(shown: str, style: str = "") -> Text:
    """Return a Text that rich prints literally, in which control characters are escaped."""
    return Text(printable(shown), style)


def console() -> Console:
    """Return a console on standard output, which is 200 columns wide if that is a file or a pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A client's name may contain characters that the terminal's encoding lacks. Python prints them escaped, not an
        # error.
        sys.stdout.reconfigure(errors="backslashreplace")
    out = _Output()
    return out if out.is_terminal else _Output(width=200)


@contextlib.contextmanager
def readings() -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows a table in place of the one that it showed before, for verbs that repeat.

    In a file, in a pipe, and on a terminal that cannot move its cursor, it prints each table below the last one.
    """
    out = console()
    if not out.is_terminal or out.is_dumb_terminal:
        yield out.print
        return
    with Live(console=out, auto_refresh=False) as live:
        yield lambda shown: live.update(shown, refresh=True)


class _Output(Console):
    """A console that raises BrokenPipeError if the program that reads the output has ended.

    `interruptible` handles the error. rich alone would end the program with a status of its own.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def new_table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """Return a table without rows. The columns in `left` hold text, and the other columns hold figures."""
    table = Table(title=text(title, "table.title"), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row to a table. Each string becomes a Text, so that rich interprets no markup in it."""
    table.add_row(*(cell if isinstance(cell, Text) else text(cell) for cell in cells))


def _numbers(fields: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the fields of a message with 64-bit integers as numbers, which protobuf's JSON writes as strings."""
    return {name: _number(value, kind.fields_by_name[name]) for name, value in fields.items()}


def _number(value: Any, field: Any) -> Any:
    if isinstance(value, list):
        return [_number(item, field) for item in value]
    if field.message_type is not None:
        return _numbers(value, field.message_type)
    return int(value) if field.cpp_type in _LONG else value
