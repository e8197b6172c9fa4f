"""A client process for tests: holds leases for writing and reading, sleeps when it is stopped, and tells what it finds
when it wakes up. Started as a module, driven by lines on its standard input, answers with a line of JSON each."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.store_client import group_to_wire, job_fields
from tests.unit.storage.builders import Layout
from trainer_client.errors import StoreUnavailableError
from trainer_client.transport.rank_store import RankStore, Slab

LATE = 0xEE


def attach(store: RankStore, layout: Layout) -> None:
    store.open_job(pb.OpenJobRequest(run_id="stopped", resume=pb.RESUME_POLICY_AUTO, **job_fields(layout)))
    store.register_shards([group_to_wire(layout.group(name)) for name in layout.groups])


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def raised(action: Any) -> str:
    """The name of what it raises."""
    try:
        action()
    except StoreUnavailableError as error:
        return type(error).__name__
    return "nothing"


def main(address: str, committed: str, new: str) -> None:
    """`committed`: a job with a committed step, of which a gradient and a parameter are leased. `new`: one without, of
    which an initial value is."""
    training, beginning = RankStore(address, "stopped 1"), RankStore(address, "stopped 2")
    layout, fresh = Layout(name=committed), Layout(name=new)
    attach(training, layout)
    attach(beginning, fresh)
    group = layout.groups[0]
    leased = {
        "read": training.acquire_read([Slab(group=group, kind=pb.KIND_PARAM)], 0).wait(),
        "gradient": training.acquire_write([Slab(group=group, kind=pb.KIND_GRAD)], 1).wait(),
        "staged": beginning.acquire_write([Slab(group=group, kind=pb.KIND_PARAM)], 0).wait(),
    }
    answer(written_bytes=sum(leased[name][0].data.numel() for name in ("gradient", "staged")))

    sys.stdin.readline()
    # What was under way when the process was stopped goes on.
    for name in ("gradient", "staged"):
        leased[name][0].data.fill_(LATE)
    answer(
        checks=[raised(store.check_leases) for store in (training, beginning)],
        publishing=raised(lambda: beginning.publish(leased["staged"])),
        applying=raised(lambda: training.apply_gradients(1, [], [])),
    )

    sys.stdin.readline()
    # Views keep the right to write, and so the ranges, until they are gone.
    training.close()
    beginning.close()
    answer()
    sys.stdin.readline()
    leased.clear()
    with closing(RankStore(address, "awake")) as again:
        answer(plane=again.plane.name)
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
