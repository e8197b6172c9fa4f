"""A client process that offers device memory, keeps a slab there, and then waits to be killed.

It is no real device: the daemon never looks. It is started as a module with the daemon's address and a job.
"""

from __future__ import annotations

import sys
import time

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.store_client import Rank
from tests.unit.storage.builders import Layout


def main() -> None:
    address, job = sys.argv[1:]
    rank = Rank(address, Layout(name=job), run_id="to be killed", name="to be killed")
    rank.resume()
    rank.call("OfferDeviceMemory", size_bytes=1 << 20, device="lag:0")
    for group in rank.groups:
        slab = pb.SlabName(group=group, kind=pb.KIND_PARAM)
        want = pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_READ, device=pb.DeviceUse())
        rank.call("AcquireLeases", wants=[want])
    print("leased", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
