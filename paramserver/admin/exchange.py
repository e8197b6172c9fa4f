"""The verbs `paramserver-admin export` and `import`, which are those of `paramserver`.

They are clients of the data side, in a package above this one, which is imported when one of them is called. That
package knows their options.
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
    """Call the verb with the credentials of the options before it, which the verb's own options override."""
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
