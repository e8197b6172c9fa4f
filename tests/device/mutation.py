"""Mutants of the code that orders copies: each wait, event, record and reference in it, left out in turn.

The sites are found in the source: a call, as a statement, of a method that waits or keeps something (WAITS); an event
that is recorded (RECORDS), in whose place stands one that was never recorded, so that it is complete at once; a block
that runs on a lane's stream, which then runs on the current one; and a tensor that is kept until a stream has used it.
A mutant is one changed function: its code takes the place of that of the right one, in this process, for good.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The modules in which copies and what they use are ordered.
MODULES = (
    "trainer_client.base.lanes.device_lanes",
    "trainer_client.training.step.gradient_memory",
    "trainer_client.training.step.gradient_group",
    "trainer_client.training.step.gradients",
    "trainer_client.training.step.hooks",
    "trainer_client.training.step.backward_hooks",
    "trainer_client.training.step.outermost_forward",
    "trainer_client.training.step.unit_holds",
    "trainer_client.training.model.units",
    "trainer_client.training.ranks.collectives",
    "trainer_client.training.ranks.process_groups",
    "trainer_client.training.run.commits",
)
# Methods that wait, make something wait, or note what has to be waited for.
WAITS = {
    "_end_copy_out",
    "_keep_until",
    "_pay",
    "_wait",
    "_wait_until_copied",
    "_wait_until_filled",
    "_wait_until_gathered",
    "_wait_until_given",
    "_wait_until_ready",
    "after_copies",
    "after_copies_in",
    "finish_copies_in",
    "note_drained",
    "rejoin",
    "reopen",
    "wait_event",
    "wait_for",
    "wait_until_drained",
}
# Waits for copies, by the expression that is waited for. `wait` of other things is no matter of copies, because
# `pending.wait()` and the `self.wait()` of LeasedMemory wait for the store's answer.
COPIES = {"self._copy", "copy", "self._sent"}
# Arguments that are functions which wait for copies.
WAITING_ARGUMENTS = {"wait_for_copies"}
RECORDS = {"mark", "record_event"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where something is left out.

    Attributes:
        module: the module's name.
        function: the qualified name of the method.
        kind: "wait", "event", "stream" or "reference".
        number: the position among the sites of the module.
        text: the source of what is left out.
    """

    module: str
    function: str
    kind: str
    number: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.kind} `{self.text}`"


def sites() -> list[Site]:
    """Return all sites."""
    return [site for module in MODULES for site, _ in _sites_of(module, ast.parse(_source(module)))]


def apply(site: Site) -> None:
    """Leave something out, for as long as this process lives."""
    module = importlib.import_module(site.module)
    tree = ast.parse(_source(site.module))
    change = next(change for found, change in _sites_of(site.module, tree) if found == site)
    change()
    whole = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    code = next(code for code in _codes(whole) if code.co_qualname == site.function)
    vars(module)["_unrecorded"] = unrecorded
    _function(module, site.function).__code__ = code


def unrecorded(*_: object) -> torch.Event:
    """Return an event that was never recorded, so it is complete, and a stream that waits for it does not wait."""
    return torch.Event(device=torch.accelerator.current_accelerator())


def _source(module: str) -> str:
    path = importlib.import_module(module).__file__
    assert path is not None
    return Path(path).read_text()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _function(module: types.ModuleType, name: str) -> types.FunctionType:
    """Return the function by its qualified name, without what decorators have made of it."""
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    assert isinstance(found, types.FunctionType), name
    return found


def _sites_of(module: str, tree: ast.Module) -> Iterator[tuple[Site, Callable[[], None]]]:
    """Yield the sites of a module, each with a call that changes `tree` accordingly. Make at most one of the calls."""
    number = 0
    for function, node in list(_functions(tree)):
        for kind, text, change in list(_changes(node)):
            yield Site(module=module, function=function, kind=kind, number=number, text=text), change
            number += 1


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))


def _changes(function: ast.FunctionDef) -> Iterator[tuple[str, str, Callable[[], None]]]:
    for node in ast.walk(function):
        for _, block in ast.iter_fields(node):
            if isinstance(block, list):
                for index, statement in enumerate(block):
                    yield from _changes_of_statement(block, index, statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in RECORDS and ast.unparse(node.func.value) != "self._trace":
                yield "event", ast.unparse(node), _unrecord(node)
            if node.func.attr == "communicating":
                for position, argument in enumerate(node.args):
                    if not isinstance(argument, ast.Starred):
                        yield "reference", f"{ast.unparse(argument)} of {ast.unparse(node)}", _drop(node, position)
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg in WAITING_ARGUMENTS:
                yield "wait", ast.unparse(keyword), _ignore(keyword)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "CopyOut" and "values" in ast.unparse(node):
            yield "reference", ast.unparse(node.args[2]), _empty(node, 2)


def _changes_of_statement(
    block: list[Any], index: int, statement: object
) -> Iterator[tuple[str, str, Callable[[], None]]]:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        owner = ast.unparse(call.func.value)
        if call.func.attr in WAITS or (call.func.attr == "wait" and owner in COPIES):
            yield "wait", ast.unparse(call), _replace(block, index, [ast.Pass()])
    if isinstance(statement, ast.With) and len(statement.items) == 1:
        context = ast.unparse(statement.items[0].context_expr)
        if context.endswith(".stream"):
            yield "stream", f"with {context}", _replace(block, index, statement.body)


def _replace(block: list[Any], index: int, statements: list[Any]) -> Callable[[], None]:
    def change() -> None:
        block[index : index + 1] = statements

    return change


def _unrecord(node: ast.Call) -> Callable[[], None]:
    def change() -> None:
        node.func, node.args = ast.Name(id="_unrecorded", ctx=ast.Load()), []

    return change


def _ignore(keyword: ast.keyword) -> Callable[[], None]:
    def change() -> None:
        keyword.value = ast.parse("lambda: None", mode="eval").body

    return change


def _drop(node: ast.Call, position: int) -> Callable[[], None]:
    def change() -> None:
        del node.args[position]

    return change


def _empty(node: ast.Call, position: int) -> Callable[[], None]:
    def change() -> None:
        node.args[position] = ast.Tuple(elts=[], ctx=ast.Load())

    return change
