"""The `paramserver-admin` command."""

from __future__ import annotations

import typer

from paramserver.admin.delete_job import delete_job
from paramserver.admin.jobs import jobs
from paramserver.admin.sessions import sessions
from paramserver.admin.shards import shards
from paramserver.admin.tiers import tiers

app = typer.Typer(
    help="Shows what a store daemon holds, tier by tier, job by job, shard by shard, and for whom.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(tiers)
app.command()(jobs)
app.command()(shards)
app.command()(sessions)
app.command("delete-job")(delete_job)


def main() -> None:
    """Entry point."""
    app()
