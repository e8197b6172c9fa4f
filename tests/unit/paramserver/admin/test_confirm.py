"""A verb that destroys something asks the operator before, and says without a terminal how to agree."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from paramserver.admin.cli import app


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_without_a_terminal_a_question_names_the_option_that_agrees(answer: str) -> None:
    result = CliRunner().invoke(app, ["delete-job", "gpt2", "--address", "unix:/nowhere"], input=answer)
    assert result.exit_code == 1
    assert result.stdout == ""
    question, *_, said = result.stderr.splitlines()
    assert question.startswith("Delete job 'gpt2' with all its committed and kept steps? This cannot be undone. [y/N]:")
    assert said == "paramserver-admin: nothing was done; without a terminal, agree with --yes"
