"""The rules of CONTRIBUTING.md on code that a machine can check hold in the product."""

from __future__ import annotations

import ast

import pytest

from tests.unit.test_import_rules import ROOT, modules

PACKAGES = ("storage", "paramserver", "trainer_client")
# A larger file or function is hard to read as one story. The ones that are larger today are named, and the lists may
# only get shorter.
MOST_LINES = 600
LARGE_FILES = {
    "storage/base/syscalls.py",
}
MOST_LINES_OF_A_FUNCTION = 70
LARGE_FUNCTIONS = {
    "paramserver/cli.py:serve",
    "trainer_client/exchange/export.py:export_step",
    "trainer_client/exchange/import_checkpoint.py:import_checkpoint",
    "trainer_client/initialization.py:initialize",
    "trainer_client/launch/cli.py:launch",
}
# The calls that move bytes to or from a file, or say that they are safe there.
FILE_CALLS = {"open", "pread", "preadv", "pwrite", "pwritev", "read", "write", "fsync", "fdatasync", "ftruncate"}


@pytest.fixture(scope="module")
def product() -> dict[str, ast.Module]:
    """Return the syntax tree of each module that is written by hand, by its path."""
    trees = {path.relative_to(ROOT).as_posix(): tree for package in PACKAGES for path, tree in modules(package)}
    return {name: tree for name, tree in trees.items() if not name.startswith("paramserver/v1/")}


def test_no_file_grows_too_large_but_those_that_are_named(product: dict[str, ast.Module]) -> None:
    found = {name for name in product if (ROOT / name).read_text(encoding="utf-8").count("\n") > MOST_LINES}

    assert found == LARGE_FILES, "split a file that came in; take one that went out of the list"


def test_no_function_grows_too_large_but_those_that_are_named(product: dict[str, ast.Module]) -> None:
    found = {
        f"{name}:{node.name}"
        for name, tree in product.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_FUNCTION
    }

    assert found == LARGE_FUNCTIONS, "split a function that came in; take one that went out of the list"


def test_data_classes_have_slots_unless_they_cache_a_property(product: dict[str, ast.Module]) -> None:
    found = {
        f"{name}:{node.name}"
        for name, tree in product.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for made in map(ast.unparse, node.decorator_list)
        if "dataclass" in made and "slots=True" not in made and "cached_property" not in ast.unparse(node)
    }

    assert found == set(), "give the data class slots; a cached property is what needs a dictionary"


def test_one_module_of_the_storage_engine_makes_the_system_calls_on_files(product: dict[str, ast.Module]) -> None:
    """Tests can make each of them fail there."""
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in product.items()
        if name.startswith("storage/") and name != "storage/base/syscalls.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"os.{call}" for call in FILE_CALLS}
    ]
    assert found == []
