"""The verb `paramserver-admin shards`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from paramserver.admin import printers, tables
from paramserver.admin.completion import Job
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.admin.nodes import only_one
from paramserver.contract.kinds import KINDS, StoredKind
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb


def shards(
    job: Job,
    address: Address = None,
    as_json: AsJson = False,
    prefix: Annotated[str, typer.Option(help="Only parameters whose name begins with this.")] = "",
    kind: Annotated[StoredKind | None, typer.Option(help="Only this kind of state.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most rows of the table; 0: all. JSON has all of them.")] = 1000,
) -> None:
    """Show every shard of a job: its range, its version and the tiers that hold it."""
    request = admin_pb.ListShardsRequest(
        job=job,
        fqn_prefix=prefix,
        kind=pb.KIND_UNSPECIFIED if kind is None else KINDS[kind],
    )
    with connect(only_one(address, "`shards`")) as store:
        pages = _pages(store, request)
        if as_json:
            _print_json(pages)
        else:
            _print_table(job, pages, limit)


def _pages(store: Any, request: admin_pb.ListShardsRequest) -> Iterator[Sequence[admin_pb.ShardInfo]]:
    """Yield the shards page by page; each page is requested when the caller asks for it."""
    while True:
        page = store.ListShards(request, timeout=DEADLINE_SECONDS)
        yield page.shards
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _print_json(pages: Iterator[Sequence[admin_pb.ShardInfo]]) -> None:
    """Print one JSON object as `printers.to_json` makes it, page by page, because a job may have 100,000 shards."""
    # The first page of shards is requested before anything is printed, so that no part of a JSON object is printed if
    # the daemon refuses the call.
    first = next(pages)
    print('{"shards": [', end="")
    separator = ""
    for page in itertools.chain([first], pages):
        for shard in page:
            print(separator, printers.to_json(shard), sep="", end="")
            separator = ", "
    print('], "next_page_token": ""}', flush=True)


def _print_table(job: str, pages: Iterator[Sequence[admin_pb.ShardInfo]], limit: int) -> None:
    """Print a table of the first `limit` shards; of all shards if it is 0.

    The limit exists because rich needs 0.5 ms for each row.
    """
    rows = itertools.chain.from_iterable(pages)
    shown = list(itertools.islice(rows, limit or None))
    printers.console().print(tables.shards_table(job, shown))
    if next(rows, None) is not None:
        note = f"Only the first {limit} are shown: --limit 0 shows all, --prefix and --kind choose, --json has all."
        print(note, flush=True)
