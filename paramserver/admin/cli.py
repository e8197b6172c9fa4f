"""The `paramserver-admin` command: the options before the verb, and the list of verbs with their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from paramserver.admin.about import config, version
from paramserver.admin.accounts import accounts
from paramserver.admin.connection import CREDENTIALS, Credentials
from paramserver.admin.copies import evict, promote
from paramserver.admin.copying import backup, copy, restore
from paramserver.admin.delete_job import delete_job
from paramserver.admin.drain import drain, undrain
from paramserver.admin.events import events
from paramserver.admin.exchange import export, import_checkpoint
from paramserver.admin.fsck import fsck
from paramserver.admin.health import health
from paramserver.admin.jobs import jobs
from paramserver.admin.kept import forget, keep, kept
from paramserver.admin.prefetch import prefetch
from paramserver.admin.reload import reload
from paramserver.admin.rollback import rollback
from paramserver.admin.sessions import sessions
from paramserver.admin.shards import shards
from paramserver.admin.tiers import tiers
from paramserver.admin.top import top
from paramserver.admin.verify import verify
from paramserver.admin.versions import versions

app = typer.Typer(
    help="Shows what a store daemon holds, tier by tier, job by job, shard by shard, and for whom; and changes it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _root(
    token_file: Annotated[
        Path | None, typer.Option(help="File of an admin token.", envvar="PARAMSERVER_TOKEN_FILE")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM authorities of the daemon's certificate.", envvar="PARAMSERVER_TLS_CA")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM certificate of this client.", envvar="PARAMSERVER_TLS_CERTIFICATE")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of it.", envvar="PARAMSERVER_TLS_KEY")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let the token cross the network in the clear.")] = False,
) -> None:
    credentials = Credentials(
        token_file=token_file, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key, insecure=insecure
    )
    CREDENTIALS.set(credentials)


# Each verb with the arguments of its examples, which `--help` shows.
_VERBS: Sequence[tuple[str, Callable[..., None], Sequence[str]]] = (
    ("health", health, ("--address unix:/run/paramserver/paramserver.sock",)),
    ("top", top, ("--address @nodes", "--once --json")),
    ("tiers", tiers, ("--watch 1", "--address 10.0.0.5:7411,10.0.0.6:7411", "--json")),
    ("accounts", accounts, ("--wait 30",)),
    ("jobs", jobs, ("--json | jq '.jobs[].committed_step'",)),
    ("shards", shards, ("JOB --prefix model.layers.0 --kind master",)),
    ("sessions", sessions, ("--json",)),
    ("versions", versions, ("JOB", "JOB --address @nodes")),
    ("prefetch", prefetch, ("--json",)),
    ("events", events, ("--kind damage --kind tier", "--follow --json")),
    ("config", config, ("--json | jq .config.host_budget",)),
    ("version", version, ("",)),
    ("kept", kept, ("JOB",)),
    ("keep", keep, ("JOB best --step 400 --note 'lowest loss'",)),
    ("forget", forget, ("JOB best",)),
    ("pin", keep, ("JOB best --step 400",)),
    ("unpin", forget, ("JOB best",)),
    (
        "copy",
        copy,
        ("JOB unix:/nvme/paramserver/paramserver.sock 10.0.0.6:7411", "JOB 10.0.0.5:7411 10.0.0.6:7411 --json"),
    ),
    ("backup", backup, ("JOB /backups/JOB", "JOB s3://bucket/JOB --step 400 --keep-last 7")),
    ("restore", restore, ("JOB /backups/JOB", "JOB s3://bucket/JOB --step 400 --address 10.0.0.6:7411")),
    ("export", export, ("/exports/JOB --job JOB --address 10.0.0.5:7411",)),
    ("import", import_checkpoint, ("/checkpoints/JOB --job JOB --address 10.0.0.5:7411",)),
    ("verify", verify, ("", "JOB --json")),
    ("evict", evict, ("JOB", "--all --yes")),
    ("promote", promote, ("JOB",)),
    ("rollback", rollback, ("JOB 400",)),
    ("delete-job", delete_job, ("JOB", "JOB --yes --address @nodes")),
    ("drain", drain, ("--yes && systemctl stop paramserver@USER", "--yes --wait 60")),
    ("undrain", undrain, ("",)),
    ("reload", reload, ("", "--address @nodes")),
    ("fsck", fsck, ("/nvme/paramserver", "/backup/paramserver --nvme-dir /backup/nvme1 --json")),
)


def _examples(verb: str, arguments: Sequence[str]) -> str:
    # The character \b makes click print the lines of a paragraph as they are, without joining them.
    lines = [f"  paramserver-admin {verb} {argument}".rstrip() for argument in arguments]
    return "\n".join(["\b", "Examples:", *lines])


# The options of these verbs are parsed by a package above this one, except for --help.
_UNPARSED = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

for _name, _verb, _arguments in _VERBS:
    _settings = _UNPARSED if _verb in (export, import_checkpoint) else None
    app.command(_name, epilog=_examples(_name, _arguments), context_settings=_settings)(_verb)


def main() -> None:
    """Run the command line."""
    app()
