"""Imports run one way, and what must be done in one place is done in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT_CODE = ("paramserver", "trainer_client", "benchmarks", "examples", "tests")
# The module that makes channels, and the test that shows what gRPC does with a channel that another module makes.
CHANNELS = (ROOT / "paramserver/contract/channel.py", ROOT / "tests/integration/test_proxies.py")
# Also config keys ("paramserver.device") have the form of a module's name.
MODULE_NAME = re.compile(r"(\w+\.)+\w+")
# The modules that sync and rename files. Those of `storage` and of the rest cannot share one, because `storage` imports
# nothing of `paramserver`, and the client nothing of `storage`.
DURABLE = ("storage/base/syscalls.py", "paramserver/contract/durable_files.py")
# These modules rename a socket and a log that is complete, so no bytes must be on the disk first. The third one
# replaces quotas in memory.
NOT_PUBLISHED = (
    "paramserver/process/socket_file.py",
    "paramserver/process/audit_log.py",
    "paramserver/services/configuration.py",
)

# Each package's rooms (subpackages and modules), floor by floor from the ground. A room imports rooms of lower floors
# only, so that a change to it can break nothing below. A new room goes on the lowest floor that this rule allows. A
# wing is a room with floors of its own, under its path: `storage/base` is one, and `config` is a room in it.
FLOORS = {
    "storage": (
        "__init__ base",
        "tiers",
        "catalog",
        "state",
        "memory",
        "steps",
        "jobs",
        "assembly fsck",
        "engine",
    ),
    "storage/base": (
        "__init__ config errors failpoints fair_queue position_lock shown_sizes slices tune_interpreter waiting",
        "integrity syscalls",
        "codec open_files",
        "shard",
        "threads tracing",
    ),
    "storage/state": (
        "__init__ slab",
        "need shard_index",
        "versions",
        "job_table",
    ),
    "storage/memory": (
        "__init__ gathering host_cache parkable scratch",
        "copy_writes gradients prefetch shadows",
    ),
    "storage/steps": (
        "__init__ damage_log renewal scrub tile",
        "transform",
        "commit reader",
        "pending_steps pins",
    ),
    "storage/jobs": (
        "__init__ accounts admission directories upkeep",
        "job_registry step_readers",
        "kept_steps",
    ),
    "paramserver": (
        "__init__ build errors events packaging v1",
        "contract",
        "vocabulary",
        "optimizer_kernel process",
        "security",
        "config rpc",
        "admin device_reads lenders sessions store_need",
        "dataplane",
        "services",
        "page",
        "metrics",
        "listening",
        "server",
        "cli",
        "__main__",
    ),
    "trainer_client": (
        "errors interface_version",
        "base",
        "accelerator client comm optimizers schedules",
        "config",
        "training",
        "copying exchange launch plan",
        "engine",
        "deepspeed inference zero",
        "as_deepspeed initialization",
        "accelerate lightning",
        "__init__",
    ),
    "trainer_client/base": (
        "__init__ alignment at_exit device foreign index_ranges log_context not_built own_memory own_packages "
        "quiet_grpc recorder standing",
        "lanes section",
    ),
    "trainer_client/client": ("__init__ transport", "store_client"),
    "trainer_client/training": (
        "__init__ data_parallel ranks",
        "model",
        "initial store_optimizer",
        "step",
        "access report run",
        "whole_parameters",
    ),
    "trainer_client/engine": (
        "__init__ getters passed_on training_loop",
        "changes device_room held_model step_gradient",
        "loop_passes parameter_states saved_steps whole_model",
        "engine",
        "assembly",
        "start",
    ),
    "benchmarks": ("__init__ common plots", "dataplane storage training"),
}


def modules(directory: str, word: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """Yield the paths and syntax trees of the directory's modules whose source contains `word`."""
    for path in sorted((ROOT / directory).rglob("*.py")):
        if word in (text := path.read_text()):
            yield path, ast.parse(text)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of all imports, also of imports within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(tree: ast.AST) -> Iterator[str]:
    """Yield the strings that name a module in some room of this project, which could be imported by that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            room = ROOT.joinpath(*node.value.split(".")[:2])
            if room.is_dir() or room.with_suffix(".py").is_file():
                yield node.value


@pytest.mark.parametrize(
    ("directory", "forbidden", "allowed"),
    [
        ("storage", ("paramserver", "trainer_client"), ()),
        ("paramserver", ("trainer_client",), ()),
        ("paramserver/v1", ("paramserver", "storage"), ("paramserver.v1",)),
        ("paramserver/contract", ("paramserver", "storage"), ("paramserver.v1", "paramserver.contract")),
        # A trainer may have a module of its own that is called `storage`, so the client imports no such package.
        ("trainer_client", ("paramserver", "storage"), ("paramserver.v1", "paramserver.contract")),
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
        for name in (*imported(tree), *named(tree))
        if within(name, forbidden) and not within(name, allowed)
    ]
    assert found == []


def rooms(package: str) -> list[str]:
    """Return the names of all rooms of a package: those in its wings, and those that lie in none."""
    floors = {
        place: " ".join(floors).split() for place, floors in FLOORS.items() if f"{place}/".startswith(f"{package}/")
    }
    return [room for place, names in floors.items() for room in names if f"{place}/{room}" not in FLOORS]


@pytest.mark.parametrize("place", FLOORS)
def test_a_room_imports_only_rooms_of_the_floors_below_it(place: str) -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS[place]) for room in rooms.split()}
    within = f"{place.replace('/', '.')}."
    found = []
    for path, tree in modules(place):
        room = path.relative_to(ROOT / place).with_suffix("").parts[0]
        assert room in floor_of, f"{place}/{room} has no place in FLOORS: put it above all rooms that it imports"
        for name in imported(tree):
            first = name.removeprefix(within).split(".")[0]
            # The package's own names (`from paramserver import __version__`) are on the ground floor.
            other = first if name.startswith(within) and first in floor_of else room
            if other != room and floor_of[other] >= floor_of[room]:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == []


def test_every_place_in_the_floors_is_taken() -> None:
    for place, floors in FLOORS.items():
        for room in " ".join(floors).split():
            path = ROOT / place / room
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"FLOORS names {place}/{room}, which is gone"


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): tree
        for package in FLOORS
        if "/" not in package
        for path, tree in modules(package)
    }
    # `from package import module` names the module, `from module import name` the module before the name.
    graph = {
        module: {own for name in imported(tree) if (own := name if name in names else name.rpartition(".")[0]) in names}
        for module, tree in names.items()
    }
    TopologicalSorter({module: others - {module} for module, others in graph.items()}).prepare()


def test_torchs_checkpoints_are_imported_only_by_exports_in_their_format() -> None:
    """torch.distributed.checkpoint takes 1 s to import, which each start of a trainer would take longer."""

    def at_start(tree: ast.Module) -> list[str]:
        return [name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in imported(node)]

    slow = ("torch.distributed.checkpoint", "trainer_client.exchange.dcp_format")
    found = {
        path.stem for path, tree in modules("trainer_client") if any(name.startswith(slow) for name in at_start(tree))
    }
    assert found == {"dcp_format"}


def test_every_channel_is_made_where_proxies_of_the_environment_are_refused() -> None:
    """Channels of grpc.aio are made elsewhere, with the same options."""
    found = []
    for directory in CLIENT_CODE:
        for path, tree in modules(directory, "secure_channel"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and path not in CHANNELS:
                    call = ast.unparse(node)
                    if node.func.attr in ("insecure_channel", "secure_channel") and "NO_PROXY" not in call:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {call}")
    assert found == []


def test_files_are_synced_and_renamed_where_one_test_makes_that_fail() -> None:
    """`tests/unit/test_durable_files.py` has the faults, and their effect on each published file."""
    # `replace` of a path has one argument, and that of a text has two.
    call = re.compile(r"\bf(?:data)?sync\(|\.rename\(|\.replace\([\w.]+\)")
    found = {
        str(path.relative_to(ROOT))
        for package in ("storage", "paramserver", "trainer_client")
        for path in (ROOT / package).rglob("*.py")
        if call.search(path.read_text())
    }
    assert found == {*DURABLE, *NOT_PUBLISHED}
