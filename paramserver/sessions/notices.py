"""The notices that the store sends to every client: which tier is degraded, and in which tier requests wait for room.

This module owns the list of lasting troubles. It must never send anything: service.py does.
"""

from __future__ import annotations

from collections.abc import Iterator

from paramserver.contract.sizes import shown_size
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import TIER_TO_WIRE
from storage.engine import Engine
from storage.tiers.contract import Tier

# If a request has waited this long for room in host memory, the daemon sends its clients a notice. Shorter waits are
# ordinary.
PRESSURE_SECONDS = 1.0

Response = pb.SessionResponse
Notice = Response.Notice


def describe_waits(engine: Engine) -> str:
    """Return what requests wait for now. The text has no names of jobs, because any client may read it."""
    host, troubles = engine.host, engine.backing.watch.problems
    memory = "host memory has room for all requests"
    if host.queue_depth:
        memory = (
            f"{host.queue_depth} requests wait for room in host memory, the first for {host.waiting_seconds:.1f} s "
            f"(host_budget is {shown_size(host.budget_bytes)}, {shown_size(host.pinned_bytes)} of them leased, read "
            "or updated)"
        )
    requests = [f"{tier.queue_depth} reads and writes of {tier.name} wait or are under way" for tier in engine.backing]
    return "; ".join([memory, *requests, *troubles])


class NoticeBoard:
    """The list of troubles that last, by tier, from which clients get notices. A tier that works well is not in it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.standing: dict[pb.Tier, Notice] = {}

    def look(self) -> Iterator[Notice]:
        """Yield a notice for each trouble that has begun or ended since the last look."""
        for tier in self._engine.backing:
            yield from self._compare(
                TIER_TO_WIRE[tier.name],
                self._degraded(tier),
                Response.EVENT_TIER_RECOVERED,
                f"the {tier.name} tier works again",
            )
        yield from self._compare(
            pb.TIER_HOST,
            self._pressure(),
            Response.EVENT_BUDGET_RELIEVED,
            "host memory has room for all requests again",
        )

    def _compare(self, tier: pb.Tier, trouble: Notice | None, relief: Response.Event, text: str) -> Iterator[Notice]:
        if trouble is not None and tier not in self.standing:
            self.standing[tier] = trouble
            yield trouble
        elif trouble is None and self.standing.pop(tier, None) is not None:
            yield Notice(text=text, event=relief, tier=tier)

    def _degraded(self, tier: Tier) -> Notice | None:
        backing = self._engine.backing
        if not backing.problems_of(tier):
            return None
        # A notice about damaged bytes goes to all sessions. So it does not name the damaged versions, because their
        # names would reveal other clients' jobs.
        why = (
            "; ".join(backing.device_problems_of(tier))
            or "some of what it stores is damaged, or was not confirmed by its device"
        )
        text = f"the {tier.name} tier is degraded: {why} (`paramserver-admin tiers` says more)"
        return Notice(text=text, event=Response.EVENT_TIER_DEGRADED, tier=TIER_TO_WIRE[tier.name])

    def _pressure(self) -> Notice | None:
        host = self._engine.host
        if host.waiting_seconds <= PRESSURE_SECONDS:
            return None
        text = (
            f"{host.queue_depth} requests wait for room in host memory, the first for {host.waiting_seconds:.1f} s; "
            f"host_budget is {shown_size(host.budget_bytes)}: return leases sooner, or raise it"
        )
        return Notice(text=text, event=Response.EVENT_BUDGET_PRESSURE, tier=pb.TIER_HOST)
