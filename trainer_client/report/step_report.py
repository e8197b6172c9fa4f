"""The report of a step: where its time went, what was waited for and why, what was moved, and the roofline.

Owns what is known from one step to the next: the last reading of the store's counters and the best rate seen on each
resource. Must never hold a step up: the store is asked while the next step runs.

[Note: the roofline] T_roof is the longest time that any one resource needed for what the step really moved and
computed, each at the best rate that it has shown in this run: compute is the time in forward and backward without waits
and copies, every other resource is bytes / bandwidth. Nothing can make the step shorter but to use that resource less,
so T_roof / T_step says how well the rest was hidden behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paramserver.contract import tiers
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.recorder import Cause, Link, StepSums
from trainer_client.step.gather_counters import UnitGathers

NVME_READ = "nvme_read"
NVME_WRITTEN = "nvme_written"
COPIED = "copied"
COMPUTE = "compute"

_COMPUTING = ("forward", "backward")
# A rate over fewer bytes says more about delays than about bandwidth.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds that this rank waited in one phase of the step; `where` is the unit, or the collective."""

    phase: str
    cause: str
    where: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Of one rank. The store's part (NVMe, fetches) is of its whole node and of all jobs there: what its daemon did
    from the end of the step before to the end of this one.

    Attributes:
        step: `engine.global_steps` when it was made.
        seconds: from the end of the step before, so that loading data counts.
        phases: seconds in forward (up to the backward, so with the loss), backward, step, inference, and idle (none of
            them): together `seconds`.
        stalls: what was waited for, the longest first.
        stall_seconds: of all of them, by cause.
        gathers: how often a unit was made whole of leased bytes; in `gather_seconds` what that took besides waiting.
        prefetch_hits: of them, those whose bytes were there when they were wanted.
        predicted_gathers: of them, those that the store had been told of ahead.
        fetch_seconds: in which the store was fetching from NVMe for forward and backward.
        bytes: moved, by link: `store_to_trainer`, `trainer_to_store`, `copied` (of what came from the store, to where a
            unit uses it), `collectives`, `nvme_read`, `nvme_written`.
        bytes_per_parameter: the same, per parameter in this rank's part (model / ranks); of NVMe, per parameter in the
            parts of all ranks that share the store.
        bandwidths: bytes per second, the best of the run, of each link that has shown one.
        resources: the least seconds that each resource needed; see [Note: the roofline].
        binding: the resource that needed longest.
        daemon_restarts: how often the store daemon was restarted in this step, and the rank has gone on with the next.
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

    @property
    def stall_fraction(self) -> float:
        """The part of the step in which this rank waited."""
        return sum(self.stall_seconds.values()) / self.seconds if self.seconds else 0.0

    @property
    def prefetch_hit_rate(self) -> float | None:
        """The part of the gathers whose bytes were there when they were wanted; None: nothing was gathered."""
        return self.prefetch_hits / self.gathers if self.gathers else None

    @property
    def hidden_fetch_fraction(self) -> float | None:
        """The part of the store's fetch time that nobody here waited for; None: nothing was fetched from NVMe."""
        if not self.fetch_seconds:
            return None
        return max(0.0, 1.0 - self.stall_seconds.get(Cause.FETCH.value, 0.0) / self.fetch_seconds)

    @property
    def roofline_seconds(self) -> float:
        """T_roof."""
        return self.resources[self.binding]

    @property
    def roofline_fraction(self) -> float:
        """T_roof / T_step: 1 if all else was hidden behind the binding resource."""
        return self.roofline_seconds / self.seconds if self.seconds else 0.0

    def stalls_of_units(self) -> dict[str, dict[str, float]]:
        """Seconds by unit (or collective) and cause."""
        totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for stall in self.stalls:
            totals[stall.where][stall.cause] += stall.seconds
        return {where: dict(causes) for where, causes in totals.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything, derived values too, as JSON has it."""
        return asdict(self) | {
            "stalls": [asdict(stall) for stall in self.stalls],
            "stall_fraction": self.stall_fraction,
            "prefetch_hit_rate": self.prefetch_hit_rate,
            "hidden_fetch_fraction": self.hidden_fetch_fraction,
            "roofline_seconds": self.roofline_seconds,
            "roofline_fraction": self.roofline_fraction,
        }

    def __str__(self) -> str:
        """One line for a log."""
        rate = self.prefetch_hit_rate
        shown = "" if rate is None else f" prefetch_hits={rate:.0%}"
        if self.daemon_restarts:
            shown += f" daemon_restarts={self.daemon_restarts}"
        return (
            f"seconds={self.seconds:.3f} stalled={self.stall_fraction:.1%}{shown} "
            f"roofline={self.roofline_fraction:.2f} bound_by={self.binding}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's place in the job.

    Attributes:
        parameters: elements of the whole model.
        world_size: ranks of the job.
        sharers: those of them that share this rank's store.
        data_plane: how bytes pass between them.
    """

    parameters: int
    world_size: int
    sharers: int
    data_plane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork:
    """What the store's tiers did within a step."""

    nvme_read: int = 0
    nvme_written: int = 0
    nvme_read_seconds: float = 0.0
    nvme_write_seconds: float = 0.0
    fetch_seconds: float = 0.0
    device_bytes_per_second: float = 0.0

    @classmethod
    def between(cls, before: pb.ReadCountersResponse, after: pb.ReadCountersResponse) -> StoreWork:
        """Of two readings; a daemon that was started anew between them has done nothing."""
        old, new = _by_tier(before), _by_tier(after)
        nvme, was, host = new[tiers.NVME], old[tiers.NVME], new[tiers.HOST]
        return cls(
            nvme_read=max(0, nvme.bytes_read - was.bytes_read),
            nvme_written=max(0, nvme.bytes_written - was.bytes_written),
            nvme_read_seconds=max(0.0, nvme.read_seconds - was.read_seconds),
            nvme_write_seconds=max(0.0, nvme.write_seconds - was.write_seconds),
            fetch_seconds=max(0.0, host.fetch_seconds - old[tiers.HOST].fetch_seconds),
            device_bytes_per_second=nvme.bytes_per_second,
        )


class Roofline:
    """The best rates of a run, in bytes per second by link, and what a step needs at them."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}

    def see(self, link: str, nbytes: int, seconds: float) -> None:
        """Takes note of a rate."""
        if nbytes >= _LEAST_BYTES and seconds > 0:
            self._best[link] = max(self._best.get(link, 0.0), nbytes / seconds)

    @property
    def bandwidths(self) -> dict[str, float]:
        return dict(self._best)

    def seconds(self, moved: Mapping[str, int]) -> dict[str, float]:
        """What each link whose rate is known needs at least."""
        return {link: nbytes / self._best[link] for link, nbytes in moved.items() if link in self._best}


def make_report(
    step: int, sums: StepSums, gathers: UnitGathers, work: StoreWork, part: Part, roofline: Roofline
) -> StepReport:
    """The report of a step, which `roofline` learns from."""
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
    roofline.see(COPIED, gathers.copied_bytes, sum(sums.gather_seconds.values()))
    roofline.see(NVME_READ, work.nvme_read, work.nvme_read_seconds)
    roofline.see(NVME_WRITTEN, work.nvme_written, work.nvme_write_seconds)
    # The daemon's own measurement is over both directions and all that it ever moved.
    if work.device_bytes_per_second:
        for name in (NVME_READ, NVME_WRITTEN):
            roofline.see(name, _LEAST_BYTES, _LEAST_BYTES / work.device_bytes_per_second)
    waited = sum(stall.seconds for stall in stalls if stall.phase in _COMPUTING)
    copied = sum(sums.gather_seconds[phase] for phase in _COMPUTING)
    compute = max(0.0, sum(sums.phases[phase] for phase in _COMPUTING) - waited - copied)
    resources = {COMPUTE: compute, **roofline.seconds(moved)}
    own = part.parameters / part.world_size
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
        data_plane=part.data_plane,
        bytes=moved,
        bytes_per_parameter={
            link: nbytes / max(1.0, own * (part.sharers if link in (NVME_READ, NVME_WRITTEN) else 1))
            for link, nbytes in moved.items()
        },
        bandwidths=roofline.bandwidths,
        resources=resources,
        binding=max(resources, key=lambda resource: resources[resource]),
        daemon_restarts=sums.restarts,
    )


def _by_tier(reading: pb.ReadCountersResponse) -> dict[int, pb.ReadCountersResponse.TierCounters]:
    return {tier.tier: tier for tier in reading.tiers}
