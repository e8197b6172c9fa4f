"""The `paramserver-admin` command: the options before the verb, and the list of verbs with their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from paramserver import __version__
from paramserver.admin.about import config, version
from paramserver.admin.accounts import accounts
from paramserver.admin.connection import CREDENTIALS, AdminCredentials
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
from paramserver.build import read_build, read_commit

# The character \b makes click print the lines of a paragraph as they are, without joining them.
_SEVERAL = """\b
Several daemons at once, with a sum of all:
  paramserver-admin jobs --address 10.0.0.5:7411,10.0.0.6:7411
  paramserver-admin top --address @nodes    # a file, one address on a line

\b
Exit status: 0 done, 1 failed, 2 wrong command line, 3 some of several daemons
failed, 4 found damage or a daemon that is not ready to stop, 130 Ctrl-C.
"""

app = typer.Typer(
    help="Shows what a store daemon holds, tier by tier, job by job, shard by shard, and for whom; and changes it.",
    epilog=_SEVERAL,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paramserver-admin {__version__}, commit {read_commit()}, build {read_build()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print version, commit and build."),
    ] = False,
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
    credentials = AdminCredentials(
        token_file=token_file, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key, insecure=insecure
    )
    CREDENTIALS.set(credentials)


# Each verb of `paramserver-admin`: its name, the line that the list of all verbs shows (short enough for a terminal of
# 80 columns), its function, and the arguments of the examples that the verb's own `--help` shows.
_VERBS: Sequence[tuple[str, str, Callable[..., None], Sequence[str]]] = (
    (
        "health",
        "Say whether the daemon serves, for probes.",
        health,
        ("--address unix:/run/paramserver/paramserver.sock",),
    ),
    ("top", "Show tiers, queues, jobs, sessions and stalls, live.", top, ("--address @nodes", "--once --json")),
    (
        "tiers",
        "Show use, traffic and hit rate of every tier.",
        tiers,
        ("--watch 1", "--address 10.0.0.5:7411,10.0.0.6:7411", "--json"),
    ),
    ("accounts", "Show who holds the used bytes of each tier.", accounts, ("--wait 30",)),
    ("jobs", "Show every job: its ranks, its steps and its bytes.", jobs, ("--json | jq '.jobs[].committed_step'",)),
    (
        "shards",
        "Show every shard of a job: its version and its tiers.",
        shards,
        ("JOB --prefix model.layers.0 --kind master",),
    ),
    ("sessions", "Show every connected client and what it holds.", sessions, ("--json",)),
    ("versions", "Show the steps of a job that the daemon still has.", versions, ("JOB", "JOB --address @nodes")),
    ("prefetch", "Show what each client needs soon, and what is fetched.", prefetch, ("--json",)),
    (
        "events",
        "Show what has happened lately; --follow goes on.",
        events,
        ("--kind damage --kind tier", "--follow --json"),
    ),
    ("config", "Show the configuration with which the daemon runs.", config, ("--json | jq .config.host_budget",)),
    ("version", "Show the versions of this tool and of the daemon.", version, ("",)),
    ("kept", "Show the kept steps of a job.", kept, ("JOB",)),
    ("keep", "Keep a committed step of a job under a name.", keep, ("JOB best --step 400 --note 'lowest loss'",)),
    ("forget", "Forget a kept step.", forget, ("JOB best",)),
    ("pin", "The same as keep.", keep, ("JOB best --step 400",)),
    ("unpin", "The same as forget.", forget, ("JOB best",)),
    (
        "copy",
        "Copy a step of a job to another daemon.",
        copy,
        ("JOB unix:/nvme/paramserver/paramserver.sock 10.0.0.6:7411", "JOB 10.0.0.5:7411 10.0.0.6:7411 --json"),
    ),
    (
        "backup",
        "Write a step of a job into a backup.",
        backup,
        ("JOB /backups/JOB", "JOB s3://bucket/JOB --step 400 --keep-last 7"),
    ),
    (
        "restore",
        "Put a step of a backup into a daemon.",
        restore,
        ("JOB /backups/JOB", "JOB s3://bucket/JOB --step 400 --address 10.0.0.6:7411"),
    ),
    (
        "export",
        "Write a step as safetensors, DCP or DeepSpeed's file.",
        export,
        ("/exports/JOB --job JOB --address 10.0.0.5:7411",),
    ),
    (
        "import",
        "Make a job of safetensors, DCP or a ZeRO checkpoint.",
        import_checkpoint,
        ("/checkpoints/JOB --job JOB --address 10.0.0.5:7411",),
    ),
    ("verify", "Read and verify all committed bytes on NVMe now.", verify, ("", "JOB --json")),
    ("evict", "Evict copies in host memory that are not in use.", evict, ("JOB", "--all --yes")),
    ("promote", "Bring the newest bytes of a job into host memory.", promote, ("JOB",)),
    ("rollback", "Make a retained step of a job the newest one again.", rollback, ("JOB 400",)),
    ("delete-job", "Delete a job with all its steps.", delete_job, ("JOB", "JOB --yes --address @nodes")),
    (
        "drain",
        "Prepare a daemon for its stop, and wait for it.",
        drain,
        ("--yes && systemctl stop paramserver@USER", "--yes --wait 60"),
    ),
    ("undrain", "End the draining of a daemon.", undrain, ("",)),
    ("reload", "Have the daemon read its configuration again.", reload, ("", "--address @nodes")),
    (
        "fsck",
        "Check a state directory that no daemon uses.",
        fsck,
        ("/nvme/paramserver", "/backup/paramserver --nvme-dir /backup/nvme1 --json"),
    ),
)


def _examples(verb: str, arguments: Sequence[str]) -> str:
    lines = [f"  paramserver-admin {verb} {argument}".rstrip() for argument in arguments]
    return "\n".join(["\b", "Examples:", *lines])


# Typer parses only --help of the verbs `export` and `import`, because the parser of their other options is in a package
# that this one may not import at its start.
_UNPARSED = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

for _name, _summary, _verb, _arguments in _VERBS:
    _settings = _UNPARSED if _verb in (export, import_checkpoint) else None
    app.command(_name, short_help=_summary, epilog=_examples(_name, _arguments), context_settings=_settings)(_verb)


def main() -> None:
    """Run the command `paramserver-admin` with the arguments of the process."""
    app()
