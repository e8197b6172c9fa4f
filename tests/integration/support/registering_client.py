"""A client process that registers the arena with a driver that records its calls, and holds write leases.

It is started as a module. For each word on its standard input it does what the word says, and answers with a line of
JSON.
"""

from __future__ import annotations

import os
import sys

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.stopped_client import answer, attach
from tests.unit.storage.builders import Layout
from trainer_client.client.transport import arena
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.pinning import PinDriver
from trainer_client.client.transport.rank_store import RankStore


def main(address: str, job: str) -> None:
    """Lease the gradients of a job that has a committed step, then do what the standard input says."""
    calls: list[str] = []
    driver = PinDriver(
        register=lambda address, nbytes: calls.append("register"),
        unregister=lambda address: calls.append("unregister"),
        synchronize=lambda: calls.append("synchronize"),
    )
    store, layout = RankStore(address, "registering", driver=driver), Layout(name=job)
    attach(store, layout, run_id=f"of {os.getpid()}")
    slabs = [SlabName(group=group, kind=pb.KIND_GRAD) for group in layout.groups]
    leased = [store.gradients.acquire(slab, 1).wait() for slab in slabs]
    place = leased[0].place
    assert place is not None
    place.pins.wait()
    answer(
        written_bytes=sum(one.data.numel() for one in leased),
        are_pinned=all(one.is_pinned for one in leased),
        offset=place.offset,
        calls=calls,
    )
    del place
    for line in sys.stdin:
        match line.strip():
            case "lose the lock":
                # The kernel releases a process's locks on a file when it closes any descriptor of the file. So it does
                # when the process ends, before the process has ended.
                (mapping,) = arena._mappings.values()
                os.close(os.dup(mapping.descriptors[0]))
                store._attachments.current.session.break_off()
            case "leave":
                leased.clear()
                store.close()
        answer(calls=calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
