"""The tables of the daemon's answers, for people.

This module must never call the daemon, and must never pass a plain string to rich; see printers.py.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paramserver.admin.printers import add_row, new_table, text
from paramserver.contract.durability import durability_text
from paramserver.contract.kinds import kind_name
from paramserver.contract.sizes import shown_size
from paramserver.contract.tiers import tier_name
from paramserver.contract.words import word_of
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb


def tiers_table(response: admin_pb.GetTiersResponse) -> RenderableType:
    """Return a table of the use, traffic and hit rate of each tier, with lines about its problems and loans below."""
    columns = ["tier", "state", "used", "budget", "use", "leased", "evictable", "hits", "queue", "read", "written"]
    table = new_table(_title("Tiers", response), columns, left=("tier", "state"))
    for tier in response.tiers:
        asked = tier.hits + tier.misses
        add_row(
            table,
            tier_name(tier.tier),
            text("degraded", "red") if tier.problems else "ok",
            shown_size(tier.used_bytes),
            shown_size(tier.budget_bytes),
            f"{tier.used_bytes / tier.budget_bytes:.0%}" if tier.budget_bytes else "-",
            shown_size(tier.leased_bytes),
            shown_size(tier.evictable_bytes),
            f"{tier.hits / asked:.0%} of {asked}" if asked else "-",
            str(tier.queue_depth),
            f"{shown_size(tier.bytes_read)} {_rate(tier.bytes_read, tier.read_seconds)}".strip(),
            f"{shown_size(tier.bytes_written)} {_rate(tier.bytes_written, tier.write_seconds)}".strip(),
        )
    # The tiers' paths are printed below the table, because a column of long paths would take the width from the
    # figures.
    lines = [text(f"{tier_name(tier.tier)}: {tier.detail}") for tier in response.tiers if tier.detail]
    for tier in response.tiers:
        if tier.quarantined_bytes:
            held = f"{shown_size(tier.quarantined_bytes)} held back: processes whose sessions ended may write to them"
            lines.append(text(f"{tier_name(tier.tier)}: {held}"))
        if tier.gradient_bytes:
            spilled = "spilled" if tier.tier == pb.TIER_NVME else "parked"
            lines.append(text(f"{tier_name(tier.tier)}: {shown_size(tier.gradient_bytes)} of {spilled} gradients"))
        if tier.activation_bytes:
            spilled = "spilled activations" if tier.tier == pb.TIER_NVME else "activations"
            lines.append(text(f"{tier_name(tier.tier)}: {shown_size(tier.activation_bytes)} of {spilled}"))
    lines += [text(line) for tier in response.tiers for line in _memory_lines(tier)]
    lines += [text(problem, "red") for tier in response.tiers for problem in tier.problems]
    if response.loop_stalls:
        longest = response.longest_loop_stall_seconds
        blocked = f"event loop: blocked {response.loop_stalls} times, up to {longest:.2f} s (see the log)"
        lines.append(text(blocked, "yellow"))
    return Group(table, *lines)


def _memory_lines(tier: admin_pb.TierInfo) -> list[str]:
    """Return lines about host memory: the loans to other daemons, and the daemons from which this one borrows."""
    lines = []
    if tier.lend_budget_bytes or tier.loans:
        lines.append(f"lent: {shown_size(tier.lent_bytes)} of lend_budget {shown_size(tier.lend_budget_bytes)}")
    for loan in tier.loans:
        lines.append(
            f"lent to {loan.borrower} (token {loan.token}, {loan.peer}): {shown_size(loan.used_bytes)} of "
            f"{shown_size(loan.size_bytes)}, read {shown_size(loan.bytes_read)}, written "
            f"{shown_size(loan.bytes_written)}, taken back {shown_size(loan.taken_back_bytes)}"
        )
    for lender in tier.lenders:
        speeds = [
            f"{what} {shown_size(speed)}/s"
            for what, speed in (("lender", lender.bytes_per_second), ("nvme", lender.nvme_bytes_per_second))
            if speed
        ]
        lines.append(
            f"lender {lender.address}: {lender.state}, {shown_size(lender.used_bytes)} of "
            f"{shown_size(lender.size_bytes)}, {lender.hits} hits, {lender.misses} misses, {lender.wrong_blocks} "
            f"wrong, {lender.timeouts} time-outs, lost {lender.losses} "
            f"times{''.join(f', {speed}' for speed in speeds)}{f' ({lender.problem})' if lender.problem else ''}"
        )
    return lines


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
                shown_size(device.used_bytes),
                shown_size(device.size_bytes),
                shown_size(device.bytes_in_flight),
                f"{device.busy_seconds:.1f} s",
                text(f"{device.stalled_seconds:.1f} s", "red") if device.stalled_seconds >= 1.0 else "-",
                f"{shown_size(device.bytes_per_second)}/s" if measured else "-",
            )
    return table


def accounts_table(response: admin_pb.GetAccountsResponse) -> Table:
    """Return a table of how many used bytes of each tier each holder has, for example a job."""
    table = new_table("Used bytes by holder", ["tier", "holder", "bytes", "of"], left=("tier", "holder"))
    for account in response.accounts:
        rows = [(text(holding.holder), holding.bytes) for holding in account.holdings]
        rows += [(text("unexplained", "red"), account.unexplained_bytes)] if account.unexplained_bytes else []
        for holder, nbytes in rows:
            add_row(table, tier_name(account.tier), holder, f"{nbytes:,}", f"{account.used_bytes:,}")
    unsettled = [tier_name(account.tier) for account in response.accounts if not account.settled]
    if unsettled:
        waiting = f"not settled: {', '.join(unsettled)}; what stays under way or unexplained was leaked"
        if moved := sum(account.moved_bytes for account in response.accounts):
            waiting += f"; {moved:,} bytes were allocated or freed meanwhile"
        table.caption = text(waiting, "yellow")
    return table


def jobs_table(jobs: Sequence[admin_pb.JobInfo]) -> RenderableType:
    """Return a table of the progress and size of each job, with the problems of replicas below it."""
    # Each job lists all tiers of its store, so the jobs say which columns the table has. If there are no jobs, the
    # table has the columns of the host and NVMe tiers, which every store has.
    tiers = sorted({pb.TIER_HOST, pb.TIER_NVME} | {entry.tier for job in jobs for entry in job.bytes})
    columns = ["job", "ranks", "sessions", "parameters", "durability", "committed", "durable", "age", "kept"]
    # The table has a column of settled steps only if a job's settled step differs from its committed step. The two are
    # always equal for jobs on one node.
    unsettled = any(_settled_text(job) != _committed_text(job) for job in jobs)
    columns += ["settled"] if unsettled else []
    replicated = any(job.replicas for job in jobs)
    columns += ["replica"] if replicated else []
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
            _committed_text(job),
            str(job.durable_step) if job.HasField("durable_step") else "-",
            f"{max(0.0, time.time() - committed_at):.0f} s" if job.HasField("committed_at_unix_seconds") else "-",
            str(job.kept_steps),
            *([_settled_text(job)] if unsettled else []),
            *([_replica_text(job)] if replicated else []),
            *(shown_size(size.get(tier, 0)) for tier in tiers),
        )
    problems = [
        text(f"replica of {job.name} at {replica.holder}: {replica.problem}", "red")
        for job in jobs
        for replica in job.replicas
        if replica.problem
    ]
    return Group(table, *problems)


def _committed_text(job: admin_pb.JobInfo) -> str:
    return str(job.committed_step) if job.HasField("committed_step") else "-"


def _settled_text(job: admin_pb.JobInfo) -> str:
    return str(job.settled_step) if job.HasField("settled_step") else "-"


def _replica_text(job: admin_pb.JobInfo) -> Text:
    """Return the newest step of each replica, and how far it is behind."""
    return text(", ".join(map(_replica_step, job.replicas)) or "-", "red" if _has_problem(job) else "")


def _has_problem(job: admin_pb.JobInfo) -> bool:
    return any(replica.problem for replica in job.replicas)


def _replica_step(replica: admin_pb.JobInfo.Replica) -> str:
    step = str(replica.step) if replica.HasField("step") else "none"
    return f"{step}, {replica.lag_steps} behind for {replica.lag_seconds:.0f} s" if replica.lag_steps else step


def steps_table(job: str, response: admin_pb.ListStepsResponse) -> Table:
    """Return a table of the steps of `job`. The column "alone" has the bytes that no other step needs."""
    tiers = sorted({pb.TIER_HOST, pb.TIER_NVME} | {entry.tier for step in response.steps for entry in step.bytes})
    where = f" in {response.state_dir}" if response.state_dir else ""
    columns = ["step", "state", "settled", "durable", "kept as", "readers", "ranks", "committed"]
    table = new_table(
        f"Steps of {job}{where}",
        [*columns, *map(tier_name, tiers), "alone"],
        left=("state", "settled", "durable", "kept as"),
    )
    for step in response.steps:
        size = {entry.tier: entry.bytes for entry in step.bytes}
        add_row(
            table,
            str(step.step),
            "newest" if step.newest else "retained" if step.retained else "held",
            "yes" if step.settled else text("no", "yellow"),
            "yes" if step.durable else text("no", "yellow"),
            ", ".join(step.kept_as) or "-",
            str(step.readers),
            str(step.world_size),
            clock(step.committed_at_unix_seconds),
            *(shown_size(size.get(tier, 0)) for tier in tiers),
            shown_size(step.alone_bytes),
        )
    return table


def kept_table(job: str, response: admin_pb.ListKeptStepsResponse) -> Table:
    """Return a table of the kept steps of `job`.

    The column "alone" has the bytes that forgetting the step would free.
    """
    columns = ["name", "step", "ranks", "kept", "bytes", "alone", "note"]
    table = new_table(f"Kept steps of {job} in {response.state_dir}", columns, left=("name", "note"))
    for kept in response.kept:
        add_row(
            table,
            kept.name,
            str(kept.step),
            str(kept.world_size),
            f"{max(0.0, time.time() - kept.kept_at_unix_seconds):.0f} s ago",
            shown_size(kept.bytes),
            shown_size(kept.alone_bytes),
            kept.note or "-",
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


def sessions_table(sessions: Sequence[admin_pb.SessionInfo]) -> Table:
    """Return a table of the connected clients and what each holds."""
    has_devices = any(session.device_budget_bytes for session in sessions)
    table = new_table(
        "Sessions",
        [
            *("client", "peer", "job", "rank", "state", "bytes by", "reads", "writes", "leased", "readers"),
            *("transfers", "age", "heard"),
            *(("on device",) if has_devices else ()),
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
            shown_size(session.leased_bytes),
            str(session.readers),
            str(session.transfers),
            f"{max(0.0, time.time() - session.opened_at_unix_seconds):.0f} s",
            f"{session.heard_seconds_ago:.1f} s ago",
            *(
                (f"{shown_size(session.device_bytes)} of {shown_size(session.device_budget_bytes)}",)
                if has_devices
                else ()
            ),
        )
    return table


def prefetch_tables(response: admin_pb.GetPrefetchResponse) -> RenderableType:
    """Return a table of the windows of all sessions, with the figures of the queue above it."""
    asked = response.hits + response.misses
    hits = f"{response.hits / asked:.1%} of {asked} reads came from host memory" if asked else "no reads yet"
    lines = [
        f"queue: {response.running} fetches under way ({shown_size(response.in_flight_bytes)} of "
        f"{shown_size(response.in_flight_budget_bytes)}), {response.waiting} wait, clients wait for {response.demands}",
        f"hits: {hits}",
        *(
            f"fetched for {job.job}: {shown_size(job.bytes)} in reads of {job.seconds:.1f} s together"
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
            shown_size(window.bytes),
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
    """Return an event as one line of text, for the verb that follows the events."""
    return text(f"{clock(event.unix_seconds)}  {event.kind:8} {event.subject}: {event.text}")


def config_table(response: admin_pb.GetConfigResponse) -> Table:
    """Return a table of the configuration, in which the values that the operator has set are bold."""
    table = new_table("Configuration", ["key", "value", "from"], left=("key", "value", "from"))
    for key in response.keys:
        value = json.loads(key.value)
        shown = "-" if value is None else value if isinstance(value, str) else key.value
        style = "" if key.is_default else "bold"
        add_row(table, text(key.key, style), text(shown, style), "default" if key.is_default else "set")
    return table


def version_table(response: admin_pb.GetVersionResponse, client: str, build: str) -> Table:
    """Return a table of the versions of a daemon and of this tool. `client` and `build` are those of this tool."""
    table = new_table("Versions", ["what", "version"], left=("what", "version"))
    rows = {
        "paramserver-admin": f"{client}, build {build}",
        "daemon": f"{response.version}, build {response.build or 'not known to a daemon so old'}",
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
    """Return a table of the damage that a verification has found."""
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


def _title(what: str, response: admin_pb.GetTiersResponse) -> str:
    # A response that adds up several daemons has no state directory, so the table's title names none.
    where = f" of {response.state_dir}" if response.state_dir else ""
    return f"{what}{where} ({response.sessions} sessions)"


def _rate(nbytes: int, seconds: float) -> str:
    return f"({shown_size(nbytes / seconds)}/s)" if seconds else ""
