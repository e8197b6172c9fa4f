"""The tables of the steps, the queue, the events, the configuration and the draining of a daemon.

Must never call the daemon, and must never pass a plain string to rich; see printers.py.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from paramserver.admin.printers import add_row, new_table, text
from paramserver.contract.tiers import tier_name
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb


def devices_table(tiers: Iterable[admin_pb.TierInfo]) -> Table:
    """Return a table of the data files and their devices."""
    columns = ["device", "tier", "used", "size", "in flight", "busy", "stalled", "speed"]
    table = new_table("Devices", columns, left=("device", "tier"))
    for tier in tiers:
        for device in tier.devices:
            measured = device.HasField("bytes_per_second")
            add_row(
                table,
                device.path,
                tier_name(tier.tier),
                decimal(device.used_bytes),
                decimal(device.size_bytes),
                decimal(device.bytes_in_flight),
                f"{device.busy_seconds:.1f} s",
                text(f"{device.stalled_seconds:.1f} s", "red") if device.stalled_seconds >= 1.0 else "-",
                f"{decimal(int(device.bytes_per_second))}/s" if measured else "-",
            )
    return table


def steps_table(job: str, response: admin_pb.ListStepsResponse) -> Table:
    """Return a table of the steps of `job`; "alone" is what no other step needs."""
    tiers = sorted({pb.TIER_HOST, pb.TIER_NVME} | {entry.tier for step in response.steps for entry in step.bytes})
    where = f" in {response.state_dir}" if response.state_dir else ""
    table = new_table(
        f"Steps of {job}{where}",
        ["step", "state", "durable", "kept as", "readers", "ranks", "committed", *map(tier_name, tiers), "alone"],
        left=("state", "durable", "kept as"),
    )
    for step in response.steps:
        size = {entry.tier: entry.bytes for entry in step.bytes}
        add_row(
            table,
            str(step.step),
            "newest" if step.newest else "retained" if step.retained else "held",
            "yes" if step.durable else text("no", "yellow"),
            ", ".join(step.kept_as) or "-",
            str(step.readers),
            str(step.world_size),
            clock(step.committed_at_unix_seconds),
            *(decimal(size.get(tier, 0)) for tier in tiers),
            decimal(step.alone_bytes),
        )
    return table


def prefetch_tables(response: admin_pb.GetPrefetchResponse) -> RenderableType:
    """Return a table of the windows of all sessions, with the figures of the queue above it."""
    asked = response.hits + response.misses
    hits = f"{response.hits / asked:.1%} of {asked} reads came from host memory" if asked else "no reads yet"
    lines = [
        f"queue: {response.running} fetches under way ({decimal(response.in_flight_bytes)} of "
        f"{decimal(response.in_flight_budget_bytes)}), {response.waiting} wait, clients wait for {response.demands}",
        f"hits: {hits}",
        *(
            f"fetched for {job.job}: {decimal(job.bytes)} in reads of {job.seconds:.1f} s together"
            for job in response.jobs
        ),
    ]
    columns = ["client", "job", "rank", "slabs", "bytes", "in memory", "under way", "waiting"]
    table = new_table("Windows", columns, left=("client", "job"))
    for window in response.windows:
        add_row(
            table,
            window.client,
            window.job or "-",
            str(window.rank),
            str(window.slabs),
            decimal(window.bytes),
            str(window.present),
            str(window.running),
            str(window.waiting),
        )
    return Group(*map(text, lines), table)


def events_table(events: Sequence[admin_pb.Event]) -> Table:
    """Return a table of events, oldest first."""
    table = new_table("Events", ["time", "kind", "subject", "what happened"], left=("time", "kind", "subject"))
    table.columns[-1].justify = "left"
    for event in events:
        add_row(table, clock(event.unix_seconds), event.kind, event.subject, event.text)
    return table


def event_line(event: admin_pb.Event) -> Text:
    """Return an event as one line, for a stream of them."""
    return text(f"{clock(event.unix_seconds)}  {event.kind:8} {event.subject}: {event.text}")


def config_table(response: admin_pb.GetConfigResponse) -> Table:
    """Return a table of the configuration; what the operator has set is bold."""
    table = new_table("Configuration", ["key", "value", "from"], left=("key", "value", "from"))
    for key in response.keys:
        value = json.loads(key.value)
        shown = "-" if value is None else value if isinstance(value, str) else key.value
        style = "" if key.is_default else "bold"
        add_row(table, text(key.key, style), text(shown, style), "default" if key.is_default else "set")
    return table


def version_table(response: admin_pb.GetVersionResponse, client: str) -> Table:
    """Return a table of the versions of a daemon and of this tool, which is `client`."""
    table = new_table("Versions", ["what", "version"], left=("what", "version"))
    rows = {
        "paramserver-admin": client,
        "daemon": response.version,
        "state directory": response.state_dir,
        "host and process": f"{response.host}, pid {response.pid}",
        "started": clock(response.started_at_unix_seconds),
        "epoch": response.epoch,
        "Python, torch, gRPC": f"{response.python}, {response.torch}, {response.grpc}",
        "format of the catalog": str(response.catalog_format),
    }
    for row in rows.items():
        add_row(table, *row)
    return table


def damage_table(damage: Sequence[admin_pb.VerifyResponse.Damage]) -> Table:
    """Return a table of what a verification has found."""
    table = new_table("Damage", ["what is wrong"], left=("what is wrong",))
    for found in damage:
        add_row(table, text(found.text, "red"))
    return table


def drain_tables(response: admin_pb.GetDrainResponse) -> RenderableType:
    """Return one line about the draining, and a table of the sessions for which it waits, if any."""
    if not response.draining:
        return text(f"not being drained: new sessions are accepted ({response.sessions} sessions)")
    if response.ready:
        return text(f"drained: ready to stop ({response.sessions} sessions have nothing uncommitted)", "green")
    table = new_table(
        f"Being drained: {len(response.waiting)} of {response.sessions} sessions are waited for",
        ["client", "job", "rank", "why"],
        left=("client", "job", "why"),
    )
    for waiting in response.waiting:
        add_row(table, waiting.client, waiting.job or "-", str(waiting.rank), waiting.why)
    return table


def clock(unix_seconds: float) -> str:
    """Return a time in the time zone of this machine, to the second."""
    return datetime.datetime.fromtimestamp(unix_seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
