"""A client process that a test stops (SIGSTOP) while it holds leases, and continues later.

It is started as a module. For each line on its standard input it does the next act, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.store_client import group_to_wire, job_fields
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import StoreUnavailableError

LATE = 0xEE


def attach(store: RankStore, layout: Layout, run_id: str = "stopped") -> None:
    store.job.open(pb.OpenJobRequest(run_id=run_id, resume=pb.RESUME_POLICY_AUTO, **job_fields(layout)))
    store.job.register_shards([group_to_wire(layout.group(name)) for name in layout.groups])


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def raised(action: Any) -> str:
    """Call `action`, and return the name of the StoreUnavailableError that it raises, or "nothing"."""
    try:
        action()
    except StoreUnavailableError as error:
        return type(error).__name__
    return "nothing"


def main(address: str, committed: str, new: str) -> None:
    """Lease a gradient and a parameter of the job `committed`, and an initial value of the job `new`.

    The first job has a committed step, the second one has none.
    """
    training, beginning = RankStore(address, "stopped 1"), RankStore(address, "stopped 2")
    layout, fresh = Layout(name=committed), Layout(name=new)
    attach(training, layout)
    attach(beginning, fresh)
    group = layout.groups[0]
    leased = {
        "read": training.leases.acquire_read([SlabName(group=group, kind=pb.KIND_PARAM)], 0).wait(),
        "gradient": [training.gradients.acquire(SlabName(group=group, kind=pb.KIND_GRAD), 1).wait()],
        "staged": beginning.leases.acquire_write([SlabName(group=group, kind=pb.KIND_PARAM)], 0).wait(),
    }
    answer(written_bytes=sum(leased[name][0].data.numel() for name in ("gradient", "staged")))

    sys.stdin.readline()
    # After the stop, the process goes on to write into its leased memory.
    for name in ("gradient", "staged"):
        leased[name][0].data.fill_(LATE)
    answer(
        checks=[raised(store.leases.check) for store in (training, beginning)],
        publishing=raised(lambda: beginning.leases.publish(leased["staged"])),
        applying=raised(lambda: training.gradients.apply(1, [], [])),
    )

    sys.stdin.readline()
    # The daemon keeps the ranges as long as this process has views of them, because it may still write.
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
