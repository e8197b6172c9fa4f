"""The generated pages of docs/reference: `python -m docs.site.reference [--check]`.

This module makes command-line.md from the parsers of both commands, and rpc.md from the comments of the .proto files.
It owns these pages as a whole. It must never read what a terminal shows: its width and its colours would come into the
pages.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from paramserver import cli
from paramserver.admin import cli as admin_cli
from trainer_client.exchange import cli as export_cli
from trainer_client.exchange import import_cli
from trainer_client.launch import cli as launch_cli
from trainer_client.plan import cli as plan_cli

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
PROTO = ROOT / "proto"
NOTE = "<!-- Made by `python -m docs.site.reference`. Do not edit. -->"

# `paramserver` passes the arguments of these verbs on to parsers of their own.
_CLIENT_VERBS = {"export": export_cli.app, "import": import_cli.app, "launch": launch_cli.app, "plan": plan_cli.app}
_PACKAGE = ".paramserver.v1."


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    return {PAGES / "command-line.md": command_line(), PAGES / "rpc.md": rpcs()}


def command_line() -> str:
    """Return the page on `paramserver` and `paramserver-admin`."""
    lines = [
        NOTE,
        "# Command line",
        "What `--help` says of each verb. [The daemon](../daemon.md), [launch and plan](../plan.md),\n"
        "[exchange](../exchange.md) and [the admin tool](../admin.md) say how the verbs are used.",
    ]
    for name, app in (("paramserver", cli.app), ("paramserver-admin", admin_cli.app)):
        lines += _command(typer.main.get_command(app), name, level=2)
    return "\n\n".join(lines) + "\n"


def _command(command: Any, name: str, *, level: int) -> Iterator[str]:
    """Yield the paragraphs on a command, and on its verbs if it is a group.

    Typer has its own copy of click, whose class of commands has no public name.
    """
    context = typer.Context(command, info_name=name)
    yield f"{'#' * level} `{name}`"
    if command.help:
        # The character \b keeps the line ends of a paragraph on a terminal.
        yield inspect.cleandoc(command.help).replace("\b\n", "")
    verbs = getattr(command, "commands", None)
    usage = "VERB ..." if verbs else re.sub(r"[{}]", "", " ".join(command.collect_usage_pieces(context)))
    yield f"```text\n{name} {usage}\n```"
    records = [record for param in command.params if (record := param.get_help_record(context))]
    if records:
        yield _table(("option", "meaning"), [(_code(_option(names)), meaning) for names, meaning in records])
    if examples := _examples(command.epilog or ""):
        yield f"```sh\n{examples}\n```"
    for verb, inner in sorted((verbs or {}).items()):
        own = typer.main.get_command(_CLIENT_VERBS[verb]) if verb in _CLIENT_VERBS else inner
        yield from _command(own, f"{name} {verb}", level=level + 1)


def _option(names: str) -> str:
    """Return the names of an option without the type of a list: its help says that it may be repeated."""
    return re.sub(r"<list\[(\w+)\]>", lambda match: f"<{match[1].lower()}>", names)


def _examples(epilog: str) -> str:
    return "\n".join(line.strip() for line in epilog.splitlines() if line.startswith("  "))


def rpcs() -> str:
    """Return the page on the services and messages of the .proto files."""
    lines = [
        NOTE,
        "# RPCs",
        "Services, messages and fields of the wire contract, with the comments of\n"
        "[parameter_store.proto](../../proto/paramserver/v1/parameter_store.proto) and\n"
        "[store_admin.proto](../../proto/paramserver/v1/store_admin.proto). [Architecture](../architecture.md)\n"
        "follows one gradient and one shard through them.",
    ]
    for file in _described():
        comments = _Comments(file)
        title = Path(file.name).stem.replace("_", " ").capitalize()
        lines.append(f"## {title}")
        lines += comments.header()
        for number, service in enumerate(file.service):
            lines.append(f"### Service {service.name}")
            for each, method in enumerate(service.method):
                request = _typed(method.input_type, is_stream=method.client_streaming)
                answer = _typed(method.output_type, is_stream=method.server_streaming)
                lines += [f"#### {method.name}", f"{request} → {answer}", comments.at(6, number, 2, each)]
        lines.append(f"### Enums of the {title.lower()}")
        for number, enum in enumerate(file.enum_type):
            lines += _enum(enum, comments, (5, number))
        lines.append(f"### Messages of the {title.lower()}")
        for number, message in enumerate(file.message_type):
            lines += _message(message, comments, (4, number), "")
    return "\n\n".join(line for line in lines if line) + "\n"


def _described() -> Sequence[FileDescriptorProto]:
    """Return the .proto files as protoc describes them, with their comments."""
    sources = sorted(path.relative_to(PROTO) for path in PROTO.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "set"
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"),
                *("--include_source_info", f"--descriptor_set_out={output}", *map(str, sources)),
            ],
            check=True,
        )
        return FileDescriptorSet.FromString(output.read_bytes()).file


class _Comments:
    """The comments of one .proto file, by the path of what they describe in the file's descriptor."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {tuple(place.path): place for place in file.source_code_info.location}

    def header(self) -> list[str]:
        """Return the comment at the head of the file, as paragraphs and lists."""
        place = self._by_path.get((12,))
        return [_markdown(place.leading_comments)] if place else []

    def at(self, *path: int) -> str:
        """Return the comment before or after an element, as Markdown."""
        place = self._by_path.get(path)
        return _markdown(place.leading_comments or place.trailing_comments) if place else ""


def _markdown(comment: str) -> str:
    """Return a comment as Markdown: its lists begin after an empty line, and named items of a table become a list."""
    lines = [line.removeprefix(" ").rstrip() for line in comment.strip("\n").splitlines()]
    made: list[str] = []
    for line in lines:
        named = re.match(r" +([A-Z_]{4,}) +(\S.*)", line)
        text = f"- `{named[1]}`: {named[2]}" if named else re.sub(r"^ {3,}", "  ", line)
        ends_list = made and made[-1].startswith(("- ", "  ")) and not text.startswith(("- ", "  "))
        begins_list = made and not made[-1].startswith(("- ", "  ")) and text.startswith("- ")
        if text and made and made[-1] and (ends_list or begins_list):
            made.append("")
        made.append(text)
    return "\n".join(made).strip()


def _message(message: DescriptorProto, comments: _Comments, path: tuple[int, ...], outer: str) -> Iterator[str]:
    """Yield the paragraphs on a message, and on those within it."""
    name = f"{outer}{message.name}"
    yield f"#### {name}"
    yield comments.at(*path)
    rows = []
    for number, field in enumerate(message.field):
        optional = "optional " if field.proto3_optional else ""
        choice = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            choice = f"one of `{message.oneof_decl[field.oneof_index].name}`"
        meaning = " ".join(comments.at(*path, 2, number).split())
        rows.append((_code(field.name), optional + _field_type(field), "; ".join(filter(None, [choice, meaning]))))
    yield _table(("field", "type", "meaning"), rows) if rows else "It has no fields."
    for number, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*path, 4, number), f"{name}.")
    for number, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from _message(inner, comments, (*path, 3, number), f"{name}.")


def _enum(enum: EnumDescriptorProto, comments: _Comments, path: tuple[int, ...], outer: str = "") -> Iterator[str]:
    yield f"#### {outer}{enum.name}"
    yield comments.at(*path)
    rows = [
        (_code(value.name), str(value.number), " ".join(comments.at(*path, 2, number).split()))
        for number, value in enumerate(enum.value)
    ]
    yield _table(("value", "number", "meaning"), rows)


def _field_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        name = _typed(field.type_name)
    else:
        name = _code(FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower())
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def _typed(full_name: str, *, is_stream: bool = False) -> str:
    """Return the name of a message or an enum as a link to its heading."""
    name = full_name.removeprefix(_PACKAGE)
    link = f"[{name}](#{name.lower().replace('.', '')})"
    return f"stream of {link}" if is_stream else link


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with --check say which are not up to date. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is not up to date")
    check = parser.parse_args(arguments).check
    stale = [
        (path, text) for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if check:
            print(f"{path} is not up to date: run python -m docs.site.reference", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
