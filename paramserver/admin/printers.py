"""Tables for people, and JSON for programs, of the daemon's answers. Must never call the daemon.

Names come from clients, so every cell, title and line goes through `text`. Must never pass a plain string to rich,
because rich would interpret markup and emoji codes in it.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from paramserver.contract.durability import durability_text
from paramserver.contract.kinds import kind_name
from paramserver.contract.printable import printable
from paramserver.contract.tiers import tier_name
from paramserver.contract.words import word_of
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb

_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def print_json(message: Message) -> None:
    """Print a message as one line of JSON; see `values_of`."""
    print(to_json(message))


def to_json(message: Message) -> str:
    """Return the JSON that `print_json` prints."""
    return json.dumps(values_of(message))


def values_of(message: Message) -> Any:
    """Return a message as values for JSON: the proto's field names, unset fields too, 64-bit integers as numbers."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _numbers(fields, message.DESCRIPTOR)


def tiers_table(response: admin_pb.GetTiersResponse) -> Table:
    """Return a table of the use, traffic and hit rate of each tier."""
    columns = ["tier", "state", "used", "budget", "use", "leased", "evictable", "hits", "queue", "read", "written"]
    table = new_table(_title("Tiers", response), columns, left=("tier", "state"))
    for tier in response.tiers:
        asked = tier.hits + tier.misses
        add_row(
            table,
            tier_name(tier.tier),
            text("degraded", "red") if tier.problems else "ok",
            decimal(tier.used_bytes),
            decimal(tier.budget_bytes),
            f"{tier.used_bytes / tier.budget_bytes:.0%}" if tier.budget_bytes else "-",
            decimal(tier.leased_bytes),
            decimal(tier.evictable_bytes),
            f"{tier.hits / asked:.0%} of {asked}" if asked else "-",
            str(tier.queue_depth),
            f"{decimal(tier.bytes_read)} {_rate(tier.bytes_read, tier.read_seconds)}".strip(),
            f"{decimal(tier.bytes_written)} {_rate(tier.bytes_written, tier.write_seconds)}".strip(),
        )
    # Paths are long. They are printed below the table, where they take no width from the figures.
    lines = [text(f"{tier_name(tier.tier)}: {tier.detail}") for tier in response.tiers if tier.detail]
    for tier in response.tiers:
        if tier.quarantined_bytes:
            held = f"{decimal(tier.quarantined_bytes)} held back: processes whose sessions ended map them"
            lines.append(text(f"{tier_name(tier.tier)}: {held}"))
    lines += [text(problem, "red") for tier in response.tiers for problem in tier.problems]
    if response.loop_stalls:
        longest = response.longest_loop_stall_seconds
        blocked = f"event loop: blocked {response.loop_stalls} times, up to {longest:.2f} s (see the log)"
        lines.append(text(blocked, "yellow"))
    table.caption = Text("\n", "table.caption").join(lines)
    table.caption_justify = "left"
    return table


def _title(what: str, response: admin_pb.GetTiersResponse) -> str:
    # The sum of several daemons has no directory.
    where = f" of {response.state_dir}" if response.state_dir else ""
    return f"{what}{where} ({response.sessions} sessions)"


def accounts_table(response: admin_pb.GetAccountsResponse) -> Table:
    """Return a table of the holders of each tier's used bytes."""
    table = new_table("Used bytes by holder", ["tier", "holder", "bytes", "of"], left=("tier", "holder"))
    for account in response.accounts:
        rows = [(text(holding.holder), holding.bytes) for holding in account.holdings]
        rows += [(text("unexplained", "red"), account.unexplained_bytes)] if account.unexplained_bytes else []
        for holder, nbytes in rows:
            add_row(table, tier_name(account.tier), holder, f"{nbytes:,}", f"{account.used_bytes:,}")
    unsettled = [tier_name(account.tier) for account in response.accounts if not account.settled]
    if unsettled:
        waiting = f"not settled: {', '.join(unsettled)}; what stays under way or unexplained was leaked"
        table.caption = text(waiting, "yellow")
    return table


def jobs_table(jobs: Sequence[admin_pb.JobInfo]) -> Table:
    """Return a table of the progress and size of each job."""
    # A job names every tier of its store; without jobs, those that every store has.
    tiers = sorted({pb.TIER_HOST, pb.TIER_NVME} | {entry.tier for job in jobs for entry in job.bytes})
    columns = ["job", "ranks", "sessions", "parameters", "durability", "committed", "durable", "age", "kept"]
    table = new_table("Jobs", [*columns, *map(tier_name, tiers)], left=("job", "durability"))
    for job in jobs:
        size = {entry.tier: entry.bytes for entry in job.bytes}
        committed_at = job.committed_at_unix_seconds
        add_row(
            table,
            job.name,
            str(job.world_size),
            str(job.sessions),
            f"{job.parameters:,}",
            durability_text(job.durability),
            str(job.committed_step) if job.HasField("committed_step") else "-",
            str(job.durable_step) if job.HasField("durable_step") else "-",
            f"{max(0.0, time.time() - committed_at):.0f} s" if job.HasField("committed_at_unix_seconds") else "-",
            str(job.kept_steps),
            *(decimal(size.get(tier, 0)) for tier in tiers),
        )
    return table


def kept_table(job: str, response: admin_pb.ListKeptStepsResponse) -> Table:
    """Return a table of the kept steps of `job`; "alone" is what forgetting one step would free."""
    columns = ["name", "step", "ranks", "kept", "bytes", "alone", "note"]
    table = new_table(f"Kept steps of {job} in {response.state_dir}", columns, left=("name", "note"))
    for kept in response.kept:
        add_row(
            table,
            kept.name,
            str(kept.step),
            str(kept.world_size),
            f"{max(0.0, time.time() - kept.kept_at_unix_seconds):.0f} s ago",
            decimal(kept.bytes),
            decimal(kept.alone_bytes),
            kept.note or "-",
        )
    return table


def sessions_table(sessions: Sequence[admin_pb.SessionInfo]) -> Table:
    """Return a table of the connected clients and what each holds."""
    table = new_table(
        "Sessions",
        [
            *("client", "peer", "job", "rank", "state", "bytes by", "reads", "writes", "leased", "readers"),
            *("transfers", "age", "heard"),
        ],
        left=("client", "peer", "job", "state", "bytes by"),
    )
    for session in sessions:
        add_row(
            table,
            session.client,
            session.peer,
            session.job or "-",
            str(session.rank) if session.job else "-",
            text("detached", "yellow") if session.detached else "attached",
            "arena" if session.maps_arena else "streams",
            str(session.read_leases),
            str(session.write_leases),
            decimal(session.leased_bytes),
            str(session.readers),
            str(session.transfers),
            f"{max(0.0, time.time() - session.opened_at_unix_seconds):.0f} s",
            f"{session.heard_seconds_ago:.1f} s ago",
        )
    return table


def shards_table(job: str, shards: Iterable[admin_pb.ShardInfo]) -> Table:
    """Return a table of the shards of `job`, with the tiers that hold each shard's newest bytes."""
    table = new_table(
        f"Shards of {job}",
        ["parameter", "kind", "offset", "elements", "type", "version", "home", "tiers", "group"],
        left=("parameter", "kind", "type", "home", "tiers", "group"),
    )
    for shard in shards:
        add_row(
            table,
            shard.fqn,
            kind_name(shard.kind),
            str(shard.offset),
            str(shard.numel),
            word_of(pb.DType, shard.dtype),
            str(shard.version) if shard.HasField("version") else "-",
            tier_name(shard.placement),
            " ".join(tier_name(tier) for tier in shard.tiers) or "-",
            shard.group,
        )
    return table


def text(shown: str, style: str = "") -> Text:
    """Return a Text that rich prints literally, in which control characters are escaped."""
    return Text(printable(shown), style)


def console() -> Console:
    """Return a console on standard output, which is 200 columns wide if that is a file or a pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A client's name may contain characters that the terminal's encoding lacks; these are printed escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    out = Console()
    return out if out.is_terminal else Console(width=200)


def new_table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """Return a table without rows; the columns in `left` have text, and the others figures."""
    table = Table(title=text(title, "table.title"), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row, whose strings are printed literally."""
    table.add_row(*(cell if isinstance(cell, Text) else text(cell) for cell in cells))


def _rate(nbytes: int, seconds: float) -> str:
    return f"({decimal(int(nbytes / seconds))}/s)" if seconds else ""


def _numbers(fields: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the fields of a message with 64-bit integers as numbers, which protobuf's JSON writes as strings."""
    return {name: _number(value, kind.fields_by_name[name]) for name, value in fields.items()}


def _number(value: Any, field: Any) -> Any:
    if isinstance(value, list):
        return [_number(item, field) for item in value]
    if field.message_type is not None:
        return _numbers(value, field.message_type)
    return int(value) if field.cpp_type in _LONG else value
