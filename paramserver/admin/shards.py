"""`paramserver-admin shards`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from paramserver.admin import printers
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb


class KindName(enum.StrEnum):
    """What can be asked for."""

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM_BUFFER = "momentum_buffer"
    SUM = "sum"


def shards(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    address: Address = None,
    as_json: AsJson = False,
    prefix: Annotated[str, typer.Option(help="Only parameters whose name begins so.")] = "",
    kind: Annotated[KindName | None, typer.Option(help="Only this kind of state.")] = None,
) -> None:
    """Every shard of a job: its range, its version and the tiers that hold it."""
    request = admin_pb.ListShardsRequest(
        job=job,
        fqn_prefix=prefix,
        kind=pb.KIND_UNSPECIFIED if kind is None else f"KIND_{kind.name}",
    )
    found = admin_pb.ListShardsResponse()
    with connect(address) as store:
        while True:
            page = store.ListShards(request, timeout=DEADLINE_SECONDS)
            found.shards.extend(page.shards)
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        if as_json:
            printers.print_json(found)
        else:
            printers.console().print(printers.shards_table(job, found.shards))
