"""The modules of the table are imported as modules of files are, and their stubs say what they have."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer_client
from trainer_client.base.not_built import NotBuilt
from trainer_client.deepspeed import groups, names, z3_leaf_module
from trainer_client.deepspeed.names import TABLE, modules_below, write_stubs


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=300)


# `utils.z3_leaf_module` is also a function of `utils`, which counts, as with DeepSpeed.
@pytest.mark.parametrize("path", sorted(set(TABLE) - {"utils.z3_leaf_module"}))
def test_a_module_of_the_table_is_an_attribute_of_the_one_above_it(path: str) -> None:
    module = importlib.import_module(f"trainer_client.{path}")
    found: Any = trainer_client
    for name in path.split("."):
        found = getattr(found, name)

    assert found is module
    assert {*module.__all__, *modules_below(path)} <= set(dir(module))


def test_every_part_of_a_path_has_a_row() -> None:
    assert {path.rpartition(".")[0] for path in TABLE} - {""} <= set(TABLE)


def test_a_star_import_gives_the_names_and_no_module_that_hides_another() -> None:
    namespace: dict[str, Any] = {}
    importlib.import_module("trainer_client.utils.z3_leaf_module")
    exec("from trainer_client.utils import *", namespace)

    assert namespace["groups"] is groups
    assert namespace["z3_leaf_module"] is z3_leaf_module.z3_leaf_module
    assert "torch" not in namespace and "logging" not in namespace


def test_a_name_that_is_not_in_the_table_is_an_error_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match=r"module 'trainer_client.ops' has no attribute 'nothing'"):
        _ = importlib.import_module("trainer_client.ops").nothing
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'trainer_client.ops.adam'"):
        exec("from trainer_client.ops.adam import nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'trainer_client.ops.nothing'"):
        importlib.import_module("trainer_client.ops.nothing")


def test_a_module_that_is_another_one_can_be_run() -> None:
    ended = run("-W", "error", "-m", "trainer_client.checkpoint.ds_to_universal", "--help")

    assert ended.returncode == 0, ended.stderr
    assert "--input_folder" in ended.stdout


def test_the_stubs_have_the_names_of_the_modules(tmp_path: Path) -> None:
    """The table is read as the build of a wheel reads it, and as `make lint` runs it: without the package."""
    ended = run("-P", "-S", names.__file__, str(tmp_path))
    assert ended.returncode == 0, ended.stderr

    for path in TABLE:
        module = importlib.import_module(f"trainer_client.{path}")
        parts = path.split(".")
        file = tmp_path.joinpath("trainer_client", *parts, *(["__init__"] if modules_below(path) else []))
        shown = set()
        for node in ast.parse(file.with_suffix(".pyi").read_text()).body:
            if isinstance(node, ast.ImportFrom):
                source = importlib.import_module(str(node.module))
                for alias in node.names:
                    if alias.name == "*":
                        assert source is module
                    elif alias.asname is not None:
                        assert getattr(module, alias.asname) is getattr(source, alias.name)
                        shown.add(alias.asname)
            elif isinstance(node, ast.ClassDef):
                assert issubclass(getattr(module, node.name), NotBuilt)
                shown.add(node.name)
            elif isinstance(node, ast.FunctionDef):
                assert callable(getattr(module, node.name))
                shown.add(node.name)
        assert not shown or shown >= set(module.__all__)


def test_stubs_can_be_written_again(tmp_path: Path) -> None:
    for _ in range(2):
        write_stubs(tmp_path)

    assert (tmp_path / "trainer_client/ops/adam.pyi").is_file()
