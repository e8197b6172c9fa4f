"""One question to one daemon, or to several at the same time, and the printing of their answers.

This module owns the forms of the output. For one daemon it prints the answer. For several it prints each answer with
its address, and then their total. It must never hide that a daemon did not answer: it prints the daemon's address on
standard error, and the exit status tells of the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import typer
from rich.console import Group, RenderableType

from paramserver.admin import printers
from paramserver.admin.connection import (
    ADDRESS_MISSING,
    UnreachableError,
    channel_for,
    connect,
    explained,
    fail,
    interruptible,
)
from paramserver.admin.exit_codes import ExitCode
from paramserver.contract.printable import printable
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub

ResultT = TypeVar("ResultT")

# The most daemons that a command for several nodes calls at the same time, because each call takes a thread.
MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[ResultT]):
    """What one daemon has answered. If it has not answered, `result` is None, and `error` says why."""

    address: str
    result: ResultT | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Generic[ResultT]):
    """A call that a verb makes to one or several daemons, and how their answers are printed.

    Attributes:
        call: asks one daemon. It gets the daemon's stub and its address.
        show: returns the answer for people.
        values: returns the answer as values for JSON.
        total: returns one answer with the sums over all daemons. None if the answers of this verb cannot be added.
        verdict: returns the exit status of the program for an answer, for example 4 if the answer reports damage.
    """

    call: Callable[[Any, str], ResultT]
    show: Callable[[ResultT], RenderableType]
    values: Callable[[Any], Any] = printers.values_of
    total: Callable[[Sequence[ResultT]], ResultT] | None = None
    verdict: Callable[[ResultT], int] = lambda _: ExitCode.DONE


def addresses_of(option: str | None) -> Sequence[str]:
    """Return the addresses that an --address names: one, several with commas between them, or those of @FILE."""
    if not option:
        fail(ADDRESS_MISSING)
    if option.startswith("@"):
        try:
            lines = Path(option[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            fail(f"cannot read the addresses of {option[1:]}: {error}")
        found = [line.partition("#")[0].strip() for line in lines]
    else:
        found = [part.strip() for part in option.split(",")]
    addresses = list(dict.fromkeys(filter(None, found)))
    if not addresses:
        fail(f"--address {option} names no daemon")
    return addresses


def is_several(option: str | None) -> bool:
    """Return whether the verb prints its output in the form for several daemons.

    It does so also if the option names a file with the address of only one daemon.
    """
    return bool(option) and ("," in (option or "") or (option or "").startswith("@"))


def only_one(option: str | None, what: str) -> str:
    """Return the address that an --address names. End the program if the option names several addresses.

    `what` names the verb that works with one daemon only, for the error text.
    """
    addresses = addresses_of(option)
    if len(addresses) > 1:
        fail(f"{what} asks one daemon, and --address names {len(addresses)}; name one of them")
    return addresses[0]


def run(option: str | None, question: Question[ResultT], *, as_json: bool) -> None:
    """Ask the daemons, print what they answer, and end with the exit status that the answers stand for."""
    code, shown, values = answer(option, question)
    with interruptible():
        if as_json:
            printers.print_json(values)
        else:
            printers.console().print(shown)
    raise typer.Exit(code)


def answer(option: str | None, question: Question[ResultT]) -> tuple[int, RenderableType, Any]:
    """Ask the daemons, and return the exit status, the answers for people, and the answers as values for JSON."""
    if not is_several(option):
        address = only_one(option, "this")
        with connect(address) as store:
            result = question.call(store, address)
            return question.verdict(result), question.show(result), question.values(result)
    answers = ask(addresses_of(option), question.call)
    for failed in answers:
        if failed.result is None:
            typer.echo(f"paramserver-admin: {printable(failed.address)}: {printable(failed.error)}", err=True)
    return _code(answers, question), _shown(answers, question), _values(answers, question)


def ask(addresses: Sequence[str], call: Callable[[Any, str], ResultT]) -> Sequence[Answer[ResultT]]:
    """Ask all daemons at the same time, and return their answers in the order of the addresses.

    No daemon is asked if an address or a file of the credentials cannot be used, which ends the program.
    """
    channels: dict[str, grpc.Channel] = {}
    unreachable: dict[str, str] = {}

    def ask_one(address: str) -> Answer[ResultT]:
        if address in unreachable:
            return Answer(address=address, error=unreachable[address])
        try:
            return Answer(address=address, result=call(StoreAdminStub(channels[address]), address))
        except grpc.RpcError as error:
            return Answer(address=address, error=explained(error, address))

    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(addresses)), "node") as threads:
        try:
            for address in addresses:
                try:
                    channels[address] = channel_for(address)
                except UnreachableError as error:
                    unreachable[address] = str(error)
            return [one.result() for one in [threads.submit(ask_one, address) for address in addresses]]
        except KeyboardInterrupt:
            # At Ctrl-C, threads still wait for daemons to answer. Their calls end when `finally` closes the channels,
            # and a call that has not begun by then fails, so it changes nothing at its daemon.
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        finally:
            for channel in channels.values():
                channel.close()


def _results(answers: Sequence[Answer[ResultT]]) -> list[ResultT]:
    return [answer.result for answer in answers if answer.result is not None]


def _code(answers: Sequence[Answer[ResultT]], question: Question[ResultT]) -> int:
    results = _results(answers)
    if len(results) < len(answers):
        return ExitCode.SOME_FAILED if results else ExitCode.FAILED
    return max(map(question.verdict, results))


def _shown(answers: Sequence[Answer[ResultT]], question: Question[ResultT]) -> RenderableType:
    parts: list[RenderableType] = []
    for one in answers:
        parts.append(printers.text(f"== {one.address}", "bold"))
        parts.append(printers.text(one.error, "red") if one.result is None else question.show(one.result))
    results = _results(answers)
    if question.total is not None and results:
        left_out = f", {len(answers) - len(results)} without an answer" if len(results) < len(answers) else ""
        parts.append(printers.text(f"== all {len(results)} daemons together{left_out}", "bold"))
        parts.append(question.show(question.total(results)))
    return Group(*parts)


def _values(answers: Sequence[Answer[ResultT]], question: Question[ResultT]) -> Any:
    results = _results(answers)
    return {
        "nodes": [
            {
                "address": one.address,
                "error": one.error,
                "answer": None if one.result is None else question.values(one.result),
            }
            for one in answers
        ],
        "total": question.values(question.total(results)) if question.total is not None and results else None,
    }
