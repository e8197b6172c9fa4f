"""A trainer that is killed while its GPU copies into leased memory. test_late_writes.py starts it as a module.

It queues a kernel of some seconds and, behind it on a side stream, copies of MARK into a leased gradient.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from tests.gpu.registered import cuda_driver
from tests.integration.support.stopped_client import attach
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.rank_store import RankStore

MARK = 0xAB
COPIES = 64


def main(address: str, job: str, numel: str, cycles: str) -> None:
    store = RankStore(address, "late writer", driver=cuda_driver())
    layout = Layout(name=job, numels=(int(numel),), groups=("a",))
    attach(store, layout, run_id=f"of {os.getpid()}")
    leased = store.gradients.acquire(SlabName(group="a", kind=pb.KIND_GRAD), 1).wait()
    assert leased.place is not None
    leased.place.pins.wait()
    assert leased.is_pinned
    marks = torch.full((leased.data.numel(),), MARK, dtype=torch.uint8, device="cuda")
    leased.data.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    part = leased.data.numel() // COPIES
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(cycles))
        for piece in leased.pieces():
            for begin in range(piece.start, piece.stop, part):
                end = min(begin + part, piece.stop)
                leased.data[begin:end].copy_(marks[begin:end], non_blocking=True)
    print(json.dumps({"offset": leased.place.offset, "nbytes": leased.data.numel()}), flush=True)
    sys.stdin.readline()
    side.synchronize()
    store.leases.release([leased]).wait()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
