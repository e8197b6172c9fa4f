"""The verbs of the two commands that lie in packages above `paramserver` are found as entry points, by their names."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paramserver import cli
from paramserver.admin import cli as admin_cli
from paramserver.contract import client_verbs
from paramserver.contract.client_verbs import GROUP, VerbError, load_verb

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
# The functions that call a verb by its name, and the modules that use them.
CALLERS = {"_call_client_verb": "paramserver/cli.py", "_call": "paramserver/admin"}


@pytest.mark.parametrize("name", DECLARED)
def test_each_verb_that_is_declared_is_installed_and_can_be_loaded(name: str) -> None:
    assert callable(load_verb(name))
    assert {verb.value for verb in entry_points(group=GROUP, name=name)} == {DECLARED[name]}


def test_the_commands_call_the_verbs_that_are_declared_and_no_others() -> None:
    called = set()
    for function, place in CALLERS.items():
        paths = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).glob("*.py"))
        for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                called.add(ast.literal_eval(node.args[0]))
    assert called == set(DECLARED)


def test_a_verb_that_is_not_installed_says_to_install_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_verbs, "entry_points", lambda **_: EntryPoints())
    with pytest.raises(VerbError, match=r"the verb 'export' is not among those that are installed.* again with pip"):
        load_verb("export")
    for app, arguments, command in (
        (cli.app, ["plan"], "paramserver"),
        (admin_cli.app, ["export", "here"], "paramserver-admin"),
        (admin_cli.app, ["restore", "job", "here", "--address", "unix:/nowhere/socket"], "paramserver-admin"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"{command}: the verb ") and "install paramserver again" in result.stderr


def test_a_verb_whose_module_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    (verb,) = entry_points(group=GROUP, name="plan")
    broken = type(verb)("plan", "trainer_client.no_such_module:main", GROUP)
    monkeypatch.setattr(client_verbs, "entry_points", lambda **_: EntryPoints([broken]))
    with pytest.raises(VerbError, match=r"cannot be imported from trainer_client\.no_such_module:main: No module"):
        load_verb("plan")
