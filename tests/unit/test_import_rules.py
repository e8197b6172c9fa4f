"""Imports run one way, and what must be done in one place is done in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT_CODE = ("paramserver", "trainer_client", "benchmarks", "examples", "tests")
# The place, and the test that shows what gRPC does elsewhere.
CHANNELS = (ROOT / "paramserver/v1/channel.py", ROOT / "tests/integration/test_proxies.py")


def modules(directory: str, word: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """Those that hold the word."""
    for path in sorted((ROOT / directory).rglob("*.py")):
        if word in (text := path.read_text()):
            yield path, ast.parse(text)


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted names of all imports, also of those within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("directory", "forbidden", "allowed"),
    [
        ("storage", ("paramserver", "trainer_client"), ()),
        ("paramserver", ("trainer_client",), ()),
        ("paramserver/v1", ("paramserver", "storage"), ("paramserver.v1",)),
        # So that a module of the user's that is called `storage` is the user's own affair.
        ("trainer_client", ("paramserver", "storage"), ("paramserver.v1",)),
    ],
)
def test_a_package_imports_only_what_lies_below_it(
    directory: str, forbidden: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    def within(name: str, packages: tuple[str, ...]) -> bool:
        return any(f"{name}.".startswith(f"{package}.") for package in packages)

    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in modules(directory)
        for name in imported(tree)
        if within(name, forbidden) and not within(name, allowed)
    ]
    assert found == []


def test_every_channel_is_made_where_proxies_of_the_environment_are_refused() -> None:
    """grpc.aio's are made elsewhere, with the same options."""
    found = []
    for directory in CLIENT_CODE:
        for path, tree in modules(directory, "secure_channel"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and path not in CHANNELS:
                    call = ast.unparse(node)
                    if node.func.attr in ("insecure_channel", "secure_channel") and "NO_PROXY" not in call:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {call}")
    assert found == []
