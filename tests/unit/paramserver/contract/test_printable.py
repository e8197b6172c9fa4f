"""Tables, logs and errors show every name that a client may choose, and no name can control the terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from rich.console import Console

from paramserver.admin import printers, tables
from paramserver.contract.channel import NO_PROXY
from paramserver.contract.printable import printable
from paramserver.process.logs import configure_logging
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.hostile_names import EVERY, SURROGATE
from trainer_client.client.transport.channel import translate


def assert_harmless(shown: str) -> None:
    """Check that the text has only printable characters and the ends of the program's own lines."""
    assert all(line.isprintable() for line in shown.split("\n")), ascii(shown)


def without_lines(table: str) -> str:
    """Return the characters of a table's cells in reading order, because a long name is folded into several lines."""
    return "".join(cell.strip() for line in table.split("\n") for cell in line.replace("┃", "│").split("│"))


@pytest.mark.parametrize("name", [*EVERY.values(), SURROGATE], ids=[*EVERY, "a surrogate"])
def test_what_is_printable_stays_and_the_rest_is_escaped(name: str) -> None:
    shown = printable(name)
    assert_harmless(shown)
    assert "\n" not in shown
    assert shown.encode() and (shown == name) == name.isprintable()


TABLES: dict[str, Callable[[str], Any]] = {
    "tiers": lambda name: tables.tiers_table(
        admin_pb.GetTiersResponse(
            state_dir=name, tiers=[admin_pb.TierInfo(tier=pb.TIER_NVME, detail=name, problems=[name])]
        )
    ),
    "jobs": lambda name: tables.jobs_table([admin_pb.JobInfo(name=name)]),
    "shards": lambda name: tables.shards_table(
        name, [admin_pb.ShardInfo(fqn=name, group=name, kind=pb.KIND_PARAM, dtype=pb.DTYPE_FLOAT32)]
    ),
    "sessions": lambda name: tables.sessions_table([admin_pb.SessionInfo(client=name, peer=name, job=name)]),
    "a line": lambda name: printers.text(f"deleted job {name}"),
}


@pytest.mark.parametrize("name", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("table", TABLES)
def test_a_table_shows_every_name_as_it_is(table: str, name: str) -> None:
    out = io.StringIO()
    Console(file=out, width=300, force_terminal=False).print(TABLES[table](name))
    assert_harmless(out.getvalue())
    whole = without_lines(out.getvalue())
    # The lines of several folded cells alternate in the text, so only a short name is found in one piece.
    assert len(name) > 50 or printable(name) in whole


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Restore the tests' own logging after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


def fail_with(name: str) -> None:
    raise ValueError(f"no such thing: {name}")


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("name", [*EVERY.values(), SURROGATE], ids=[*EVERY, "a surrogate"])
def test_a_log_shows_every_name_on_the_line_of_its_event(capsys: pytest.CaptureFixture[str], name: str) -> None:
    configure_logging("info", "console")
    logger = logging.getLogger("paramserver")
    logger.warning("session of %s ended after %.1f s; %d leases voided", name, 1.5, 3)
    logger.warning("by %(name)s: %(error)s", {"name": name, "error": ValueError(name)})
    first, second, end = capsys.readouterr().err.split("\n")
    assert_harmless(first)
    assert f"session of {printable(name)} ended after 1.5 s; 3 leases voided" in first
    assert f"by {printable(name)}: {printable(name)}" in second and end == ""


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("name", [*EVERY.values(), SURROGATE], ids=[*EVERY, "a surrogate"])
def test_a_stack_shows_an_exception_that_quotes_a_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    configure_logging("info", "console")
    try:
        fail_with(name)
    except ValueError:
        logging.getLogger("paramserver").exception("a request failed")
    written = capsys.readouterr().err
    assert_harmless(written)
    assert "fail_with" in written and "no such thing" in written


@pytest.fixture(scope="module")
def refusing() -> Iterator[grpc.Channel]:
    """A channel to a server that refuses each call with an error whose text is the request."""

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, request.decode())

    server = grpc.server(ThreadPoolExecutor(1))
    handlers: dict[str, Any] = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("hostile", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=NO_PROXY) as channel:
        yield channel
    server.stop(None)


@pytest.mark.parametrize("name", EVERY.values(), ids=EVERY)
def test_a_clients_error_quotes_the_daemon_harmlessly(refusing: grpc.Channel, name: str) -> None:
    call: Any = refusing.unary_unary("/hostile/Refuse")
    with pytest.raises(grpc.RpcError) as caught:
        call(f"there is no job {name}".encode(), timeout=20)
    error = translate(caught.value)
    assert_harmless(str(error))
    assert f"there is no job {printable(name)}" in str(error)
