"""The verbs `paramserver-admin export` and `import`, which do the same as those verbs of `paramserver`.

These verbs read and write tensors of jobs. The package `trainer_client` has their code and their options, and is
imported when one of them is called.
"""

from __future__ import annotations

import typer

from paramserver.admin.connection import CREDENTIALS, client_verb


def export(context: typer.Context) -> None:
    """Write a committed step of a job as safetensors, torch's DCP, or DeepSpeed's fp32 file.

    This is `paramserver export`, whose --help lists the options.
    """
    _call("export", context.args)


def import_checkpoint(context: typer.Context) -> None:
    """Write safetensors, a state dict, torch's DCP, or a ZeRO checkpoint of DeepSpeed into the store as a new job.

    This is `paramserver import`, whose --help lists the options.
    """
    _call("import", context.args)


def _call(name: str, arguments: list[str]) -> None:
    """Call a verb of `trainer_client` with the token and TLS files that the options before the verb name.

    The same options after the verb win over those before it.
    """
    given = CREDENTIALS.get()
    files = {
        "--token-file": given.token_file,
        "--tls-ca": given.tls_ca,
        "--tls-certificate": given.tls_certificate,
        "--tls-key": given.tls_key,
    }
    options = [word for option, path in files.items() if path is not None for word in (option, str(path))]
    insecure = ["--insecure"] if given.insecure else []
    client_verb(name)([*options, *insecure, *arguments], "paramserver-admin")
