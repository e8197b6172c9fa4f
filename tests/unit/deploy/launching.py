"""The commands of example deployments, checked by the launcher itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from trainer_client.launch.cli import app

ROOT = Path(__file__).parents[3]
# Where the image of trainers has the examples.
EXAMPLES_OF_IMAGE = "/opt/paramserver/examples"


def dry_run(arguments: Sequence[str]) -> str:
    """Return the command that `paramserver launch` would run with the arguments of a container of the trainers' image.

    The launcher checks that the script exists, so the path of the image is replaced by that of the checkout.
    """
    here = [text.replace(EXAMPLES_OF_IMAGE, str(ROOT / "examples")) for text in arguments]
    result = CliRunner().invoke(app, ["--dry-run", *here], env={"PARAMSERVER_ADDRESS": "unix:/run/paramserver/s"})
    assert result.exit_code == 0, result.output
    return result.output
