"""The report of a step: where its time went, its waits and their causes, the bytes that it moved, and the roofline.

This module owns the best rate that each link has shown in the run. It must never communicate: `reporter.py` requests
the store's counters.

[Note: the roofline] For each resource (compute, and each link that moves bytes), the report has the least time that the
resource needed for this step. For compute this is the time in forward and backward without waits and copies. For a link
it is the bytes moved, divided by the best bandwidth that the link has shown in this run. T_roof is the longest of these
times. The step could not be shorter than T_roof without using that resource less. So T_roof / T_step says how well all
other work was hidden behind that resource.

The computation of an accelerator and the copies to it are measured by events on the device. If an event is not complete
at the end of its step, its time is in the report of the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from paramserver.contract import tiers
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import Cause, Link, StepSums
from trainer_client.training.step.gather_counters import UnitGathers

NVME_READ = "nvme_read"
NVME_WRITTEN = "nvme_written"
COPIED = "copied"
COMPUTE = "compute"

_COMPUTING = ("forward", "backward")
# Only transfers of at least so many bytes are used to measure bandwidth, because latency dominates smaller ones.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds that this rank waited in one phase for one cause; `where` is the unit or the collective it waited for."""

    phase: str
    cause: str
    where: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report of one step of one rank.

    The values of the store (NVMe, fetches) are those of the whole daemon, with all its ranks and jobs, from the end of
    the step before to the end of this step.

    Attributes:
        step: `engine.global_steps` at the end of the step.
        seconds: duration since the end of the step before; it includes the loading of data.
        phases: seconds in forward (until backward begins, so with the loss), backward, step, inference, and idle (none
            of these phases). They add up to `seconds`.
        stalls: the waits of this rank, the longest first.
        stall_seconds: seconds of all waits, by cause.
        gathers: how often a unit was gathered from leased bytes.
        gather_seconds: seconds of these gathers without the waits in them.
        prefetch_hits: number of gathers whose bytes were in host memory already when this rank needed them.
        predicted_gathers: number of gathers that this rank had announced to the store before.
        fetch_seconds: seconds in which the store was fetching from NVMe for forward and backward.
        data_plane: how bytes pass between rank and store: "arena" or "streams".
        bytes: bytes moved, by link: `store_to_trainer`, `trainer_to_store`, `copied` (leased bytes that were copied to
            where a unit uses them), `collectives`, `nvme_read`, `nvme_written`.
        bytes_per_parameter: `bytes` divided by the number of parameters in this rank's part (model / ranks); for the
            NVMe links, in the parts of all ranks that share the store.
        bandwidths: for each link with a measured rate, its best rate in this run, in bytes per second.
        resources: the least seconds that each resource needed; see [Note: the roofline].
        binding: the resource that needed the most time.
        daemon_restarts: how often the store daemon was restarted in this step.
        boundaries: bytes of the boundaries of activation checkpoints, if boundaries may leave the device: `kept` on the
            device, `moved` to the store, computed `again`, and `spilled` by the store to NVMe.
    """

    step: int
    seconds: float
    phases: Mapping[str, float]
    stalls: tuple[Stall, ...]
    stall_seconds: Mapping[str, float]
    gathers: int
    gather_seconds: float
    prefetch_hits: int
    predicted_gathers: int
    fetch_seconds: float
    data_plane: str
    bytes: Mapping[str, int]
    bytes_per_parameter: Mapping[str, float]
    bandwidths: Mapping[str, float]
    resources: Mapping[str, float]
    binding: str
    daemon_restarts: int
    boundaries: Mapping[str, int]

    @property
    def stall_fraction(self) -> float:
        """The fraction of the step in which this rank waited."""
        return sum(self.stall_seconds.values()) / self.seconds if self.seconds else 0.0

    @property
    def prefetch_hit_rate(self) -> float | None:
        """`prefetch_hits` divided by `gathers`; None if no unit was gathered."""
        return self.prefetch_hits / self.gathers if self.gathers else None

    @property
    def hidden_fetch_fraction(self) -> float | None:
        """The fraction of the store's fetch time for which this rank did not wait; None if nothing came from NVMe."""
        if not self.fetch_seconds:
            return None
        return max(0.0, 1.0 - self.stall_seconds.get(Cause.FETCH.value, 0.0) / self.fetch_seconds)

    @property
    def roofline_seconds(self) -> float:
        """T_roof in seconds; see [Note: the roofline]."""
        return self.resources[self.binding]

    @property
    def roofline_fraction(self) -> float:
        """T_roof / T_step; it is 1 if all other work was hidden behind the binding resource."""
        return self.roofline_seconds / self.seconds if self.seconds else 0.0

    def stalls_of_units(self) -> dict[str, dict[str, float]]:
        """Return the seconds that this rank waited, by the unit or collective it waited for, and then by cause."""
        totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for stall in self.stalls:
            totals[stall.where][stall.cause] += stall.seconds
        return {where: dict(causes) for where, causes in totals.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return all values, including those of the properties, as types that JSON has."""
        return asdict(self) | {
            "stalls": [asdict(stall) for stall in self.stalls],
            "stall_fraction": self.stall_fraction,
            "prefetch_hit_rate": self.prefetch_hit_rate,
            "hidden_fetch_fraction": self.hidden_fetch_fraction,
            "roofline_seconds": self.roofline_seconds,
            "roofline_fraction": self.roofline_fraction,
        }

    def __str__(self) -> str:
        """Return the report as one line for a log: the times, the waits and the moved bytes of the step."""
        rate = self.prefetch_hit_rate
        shown = "" if rate is None else f" prefetch_hits={rate:.0%}"
        if self.daemon_restarts:
            shown += f" daemon_restarts={self.daemon_restarts}"
        if any(self.boundaries.values()):
            shown += " boundaries=" + ",".join(f"{name}:{nbytes}" for name, nbytes in self.boundaries.items())
        return (
            f"seconds={self.seconds:.3f} stalled={self.stall_fraction:.1%}{shown} "
            f"roofline={self.roofline_fraction:.2f} bound_by={self.binding}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The sizes of the model and of the job, and how this rank reaches its store and computes.

    Attributes:
        parameters: number of elements of the whole model.
        world_size: number of ranks of the job.
        sharers: number of ranks that use the same store as this rank, itself included.
        data_plane: how bytes pass between rank and store: "arena" or "streams".
        is_on_device: whether the rank computes on an accelerator.
    """

    parameters: int
    world_size: int
    sharers: int
    data_plane: str
    is_on_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork:
    """The bytes that the store's tiers have moved within a step, and the seconds that they took for it.

    `device_bytes_per_second` is the speed of all NVMe devices together, as the store has measured it.
    """

    nvme_read: int = 0
    nvme_written: int = 0
    nvme_read_seconds: float = 0.0
    nvme_write_seconds: float = 0.0
    fetch_seconds: float = 0.0
    device_bytes_per_second: float = 0.0
    spilled_activations: int = 0

    @classmethod
    def between(
        cls, before: pb.ReadCountersResponse, after: pb.ReadCountersResponse, *, restarts: int = 0
    ) -> StoreWork:
        """Return the work between two readings of the store's counters: the differences of the counters.

        If the daemon was restarted between the two readings, its counters began at 0 again. All bytes and seconds of
        the result are 0 then, because the true ones are not known.

        Args:
            restarts: how many restarts of the daemon this rank knows of. A restart of which it does not know is found
                because a counter is lower than before.
        """
        old, new = _by_tier(before), _by_tier(after)
        nvme, was, host = new[tiers.NVME], old[tiers.NVME], new[tiers.HOST]
        work = cls(
            nvme_read=nvme.bytes_read - was.bytes_read,
            nvme_written=nvme.bytes_written - was.bytes_written,
            nvme_read_seconds=nvme.read_seconds - was.read_seconds,
            nvme_write_seconds=nvme.write_seconds - was.write_seconds,
            fetch_seconds=host.fetch_seconds - old[tiers.HOST].fetch_seconds,
            device_bytes_per_second=nvme.bytes_per_second,
            spilled_activations=after.spilled_activation_bytes - before.spilled_activation_bytes,
        )
        if restarts or any(value < 0 for value in astuple(work)):
            return cls(device_bytes_per_second=nvme.bytes_per_second)
        return work


class Roofline:
    """Keeps the best rate of each link in this run, for the roofline of the reports.

    `see` adds a transfer, and `seconds` returns the least time that each link needs for some bytes.
    """

    def __init__(self) -> None:
        self._best: dict[str, float] = {}

    def see(self, link: str, nbytes: int, seconds: float) -> None:
        """Keep the rate of a transfer if it is the link's best so far. Transfers below 1 MiB do not count."""
        if nbytes >= _LEAST_BYTES and seconds > 0:
            self._best[link] = max(self._best.get(link, 0.0), nbytes / seconds)

    @property
    def bandwidths(self) -> dict[str, float]:
        return dict(self._best)

    def seconds(self, moved: Mapping[str, int]) -> dict[str, float]:
        """Return the least seconds that each link needs for the bytes `moved`, for links with a known rate."""
        return {link: nbytes / self._best[link] for link, nbytes in moved.items() if link in self._best}


def make_report(
    step: int, sums: StepSums, gathers: UnitGathers, work: StoreWork, place: RankPlace, roofline: Roofline
) -> StepReport:
    """Return the report of a step, and add the rates of the step to `roofline`."""
    stalls = [
        Stall(phase=key.phase, cause=key.cause.value, where=key.where, seconds=seconds)
        for key, seconds in sorted(sums.stalls.items(), key=lambda item: -item[1])
    ]
    by_cause: dict[str, float] = defaultdict(float)
    for stall in stalls:
        by_cause[stall.cause] += stall.seconds
    moved = {link.value: sums.link_bytes[link] for link in Link}
    moved |= {NVME_READ: work.nvme_read, NVME_WRITTEN: work.nvme_written}
    moved[COPIED] = gathers.copied_bytes
    for link in Link:
        roofline.see(link.value, sums.link_bytes[link], sums.link_seconds[link])
    if place.is_on_device:
        compute = sum(sums.compute_seconds[phase] for phase in _COMPUTING)
        roofline.see(COPIED, sums.to_device_bytes, sums.to_device_seconds)
    else:
        compute = _host_seconds(sums, stalls)
        roofline.see(COPIED, gathers.copied_bytes, sum(sums.gather_seconds.values()))
    roofline.see(NVME_READ, work.nvme_read, work.nvme_read_seconds)
    roofline.see(NVME_WRITTEN, work.nvme_written, work.nvme_write_seconds)
    # The daemon also reports the speed of its NVMe devices since its start, as one number for reads and writes. This
    # number counts as the rate of one transfer in each direction, so that reads and writes have a rate even before this
    # run has measured one.
    if work.device_bytes_per_second:
        for name in (NVME_READ, NVME_WRITTEN):
            roofline.see(name, _LEAST_BYTES, _LEAST_BYTES / work.device_bytes_per_second)
    resources = {COMPUTE: compute, **roofline.seconds(moved)}
    own = place.parameters / place.world_size
    return StepReport(
        step=step,
        seconds=sums.ended - sums.began,
        phases=dict(sums.phases),
        stalls=tuple(stalls),
        stall_seconds=dict(by_cause),
        gathers=gathers.gathers,
        gather_seconds=sum(sums.gather_seconds.values()),
        prefetch_hits=gathers.hits,
        predicted_gathers=gathers.predicted,
        fetch_seconds=work.fetch_seconds,
        data_plane=place.data_plane,
        bytes=moved,
        bytes_per_parameter={
            link: nbytes / max(1.0, own * (place.sharers if link in (NVME_READ, NVME_WRITTEN) else 1))
            for link, nbytes in moved.items()
        },
        bandwidths=roofline.bandwidths,
        resources=resources,
        binding=max(resources, key=lambda resource: resources[resource]),
        daemon_restarts=sums.restarts,
        boundaries={
            "kept": sums.boundary_bytes["saved"] - sums.boundary_bytes["moved"] - sums.boundary_bytes["again"],
            "moved": sums.boundary_bytes["moved"],
            "again": sums.boundary_bytes["again"],
            "spilled": work.spilled_activations,
        },
    )


def _host_seconds(sums: StepSums, stalls: Sequence[Stall]) -> float:
    """Return the seconds that this rank computed on the CPU in forward and backward, without waits and copies."""
    waited = sum(stall.seconds for stall in stalls if stall.phase in _COMPUTING)
    copied = sum(sums.gather_seconds[phase] for phase in _COMPUTING)
    return max(0.0, sum(sums.phases[phase] for phase in _COMPUTING) - waited - copied)


def _by_tier(reading: pb.ReadCountersResponse) -> dict[int, pb.ReadCountersResponse.TierCounters]:
    return {tier.tier: tier for tier in reading.tiers}
