"""The copies of slabs in the memory of sessions' devices: which session has offered how much, and its leases on them.

This module owns no memory: the directory of each session is a DeviceMemory of the engine's gpu tier, and the bytes are
the client's. It must never lease a copy whose bytes are not those that a read in the store would return.
"""

from __future__ import annotations

import asyncio

from paramserver.rpc import convert
from paramserver.sessions.leases import DeviceLease
from paramserver.sessions.session import Session
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import NotFoundError
from storage.base.shard import Kind
from storage.engine import Engine
from storage.state.slab import NEVER, Slab
from storage.state.versions import Job
from storage.steps.pins import Pin
from storage.tiers.gpu import DeviceRange

# If a client makes the memory that it offers of its device smaller, `offer` waits for leases beyond the new size and
# checks at this interval. Clients do so between two steps, when all their leases end within milliseconds.
LOOK_AGAIN_SECONDS = 0.005


class DeviceCopies:
    """The leases on the copies of slabs in memory of sessions' devices, and the ranges for new copies.

    Grants and the services call it when a client offers device memory, reads a slab or returns a lease.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def offer(self, session: Session, device: str, size_bytes: int) -> None:
        """Set how much memory of its device a session offers, and wait until no lease lies beyond that size.

        Raises:
            NotFoundError: the session ended meanwhile.
        """
        if session.device is None:
            session.device = self._engine.gpu.open(f"{device} of {session.client}")
        session.device.resize(size_bytes)
        while session.device is not None and not session.device.is_within_budget:
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        if not session.state.has_leases:
            raise NotFoundError("the session ended while leases on its device's memory were waited for")

    def lease(
        self, session: Session, job: Job, group: str, kind: Kind, as_of: int | None, next_use: float, lease_id: int
    ) -> DeviceLease | None:
        """Lease the copy that a session has of a slab; None if it has none with the bytes that are wanted.

        Raises:
            NotFoundError: the job has no such slab.
        """
        if session.device is None:
            return None
        slab = self._engine.pins.newest_slab(job, group, kind, as_of)
        if slab is None or slab.latest is None:
            return None
        range_ = session.device.find(slab, next_use)
        if range_ is None:
            return None
        leased = DeviceLease(lease_id=lease_id, slab=slab, version=slab.latest, range_=range_)
        session.device_leases[lease_id] = leased
        return leased

    def place(self, session: Session, pin: Pin, next_use: float) -> DeviceRange | None:
        """Return a range of its device's memory in which a session may keep a copy of the slab that `pin` holds.

        Return None if the device has no room for the copy, or the bytes are not the newest of their slab.
        """
        slab = pin.slab
        if session.device is None:
            return None
        if slab.latest is None or pin.copy.step != slab.latest:
            # The pinned bytes are those of an earlier step, and the slab's next use needs its newest version. So the
            # bytes get no room in the device's memory.
            return None
        return session.device.place(slab, slab.nbytes, next_use)

    def end_place(self, session: Session, slab: Slab, range_: DeviceRange, *, is_kept: bool) -> None:
        """End the reservation of the range that `place` returned.

        With `is_kept`, the session has copied the slab's bytes to the range, so later leases find them there.
        """
        if session.device is not None:
            session.device.release(slab, range_, is_kept=is_kept)

    def release(self, session: Session, leased: DeviceLease) -> None:
        """End a lease on a copy in device memory, which another copy may replace from now on."""
        del session.device_leases[leased.lease_id]
        if session.device is not None:
            session.device.release(leased.slab, leased.range_)

    def has(self, session: Session, job: Job, group: str, kind: Kind) -> bool:
        """Return whether a session has the newest bytes of a slab on its device, and no write is replacing them.

        Raises:
            NotFoundError: the job has no such slab.
        """
        if session.device is None:
            return False
        slab = self._engine.pins.newest_slab(job, group, kind, None)
        return slab is not None and session.device.has(slab)

    def forget(self, session: Session) -> None:
        """Forget all copies of a session that ends."""
        session.device_leases.clear()
        if session.device is not None:
            self._engine.gpu.close_memory(session.device)
            session.device = None


def next_use_on_device(want: pb.AcquireLeasesRequest.Want) -> float | None:
    """Return the position at which a client needs a slab on its device again.

    It is NEVER if that is not known, and None if the client does not bring the slab to its device.

    Raises:
        InvalidRequestError: the position is higher than any that a trace can have.
    """
    if not want.HasField("device"):
        return None
    given = want.device
    return convert.position(given.next_use, "wants.device.next_use") if given.HasField("next_use") else NEVER
