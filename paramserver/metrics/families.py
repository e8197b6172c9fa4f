"""The metrics of a store's readings: name, meaning, and the field of the reading that each of them shows.

Names follow the conventions of Prometheus: base units, and `_total` at the end of a counter. docs/metrics.md lists
them, and a test compares both. This module must never have a label whose values clients could make without bound: the
collector limits the names of jobs, and there is no label for sessions or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paramserver.contract.words import word_of, words_of
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb

PREFIX = "paramserver_"
ReadingT = TypeVar("ReadingT")


@dataclass(frozen=True, slots=True)
class Figure(Generic[ReadingT]):
    """A metric, and how its value is taken from a message of StoreAdmin (a reading), for example from TierInfo.

    Attributes:
        name: the metric's name without the prefix and without `_total`.
        meaning: one sentence for people, with the unit if the name has none.
        value: returns the value of the metric in a reading, or None if this reading has no value for it.
        is_counter: whether the value only grows, and begins at 0 when the daemon starts.
        tiers: for metrics of tiers, the tiers that have the metric. If it is empty, all tiers have it.
    """

    name: str
    meaning: str
    value: Callable[[ReadingT], float | None]
    is_counter: bool = False
    tiers: tuple[pb.Tier, ...] = ()

    @property
    def full_name(self) -> str:
        """The name under which a monitoring system finds the metric."""
        return f"{PREFIX}{self.name}{'_total' if self.is_counter else ''}"

    def family(self, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], ReadingT]]) -> Metric:
        """Return the metric with one value for each row, which has the label values and the reading."""
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        family = kind(PREFIX + self.name, self.meaning, labels=labels)
        for values, reading in rows:
            if (value := self.value(reading)) is not None:
                family.add_metric(values, value)
        return family


_HOST, _NVME = (pb.TIER_HOST,), (pb.TIER_NVME,)
_GPU_AND_HOST = (pb.TIER_GPU, pb.TIER_HOST)
# A read that one of these tiers cannot serve needs a lower tier. NVMe is the lowest one.
_ALL_BUT_NVME = tuple(tier for tier in words_of(pb.Tier).values() if tier != pb.TIER_NVME)
_HOST_AND_NVME = (pb.TIER_HOST, pb.TIER_NVME)

TIERS: tuple[Figure[admin_pb.TierInfo], ...] = (
    Figure("tier_budget_bytes", "The tier's budget.", lambda tier: tier.budget_bytes),
    Figure("tier_used_bytes", "Allocated bytes.", lambda tier: tier.used_bytes),
    Figure(
        "tier_evictable_bytes",
        "Bytes of clean copies that can be evicted at once.",
        lambda tier: tier.evictable_bytes,
        tiers=_ALL_BUT_NVME,
    ),
    Figure(
        "tier_leased_bytes", "Bytes under a lease or an update.", lambda tier: tier.leased_bytes, tiers=_GPU_AND_HOST
    ),
    Figure(
        "tier_quarantined_bytes",
        "Bytes that processes of ended sessions, or their devices, may still write to.",
        lambda tier: tier.quarantined_bytes,
        tiers=_HOST,
    ),
    Figure(
        "tier_lent_bytes",
        "Bytes that other daemons have borrowed and use.",
        lambda tier: tier.lent_bytes,
        tiers=_HOST,
    ),
    Figure(
        "tier_lend_budget_bytes",
        "Most bytes that other daemons may borrow.",
        lambda tier: tier.lend_budget_bytes,
        tiers=_HOST,
    ),
    Figure("tier_loans", "Loans that other daemons have.", lambda tier: len(tier.loans), tiers=_HOST),
    Figure(
        "tier_taken_back_bytes",
        "Bytes of the present loans that were taken back.",
        lambda tier: sum(loan.taken_back_bytes for loan in tier.loans),
        tiers=_HOST,
    ),
    Figure(
        "tier_gradient_bytes",
        "Bytes of the gradients that clients have parked, by the tier that has them: nvme has those that were spilled.",
        lambda tier: tier.gradient_bytes,
        tiers=_HOST_AND_NVME,
    ),
    Figure("tier_queue_depth", "Requests that wait or are under way.", lambda tier: tier.queue_depth),
    Figure("tier_problems", "Problems of the tier; with any, it is degraded.", lambda tier: len(tier.problems)),
    Figure("tier_hits", "Reads that the tier served.", lambda tier: tier.hits, is_counter=True, tiers=_ALL_BUT_NVME),
    Figure(
        "tier_misses",
        "Reads that needed a lower tier.",
        lambda tier: tier.misses,
        is_counter=True,
        tiers=_ALL_BUT_NVME,
    ),
    Figure(
        "tier_promotions",
        "Slabs brought into the tier from a lower one.",
        lambda tier: tier.promotions,
        is_counter=True,
    ),
    Figure(
        "tier_demotions",
        "Slabs evicted from the tier, or written to a lower one.",
        lambda tier: tier.demotions,
        is_counter=True,
    ),
    Figure("tier_read_bytes", "Bytes read from the tier.", lambda tier: tier.bytes_read, is_counter=True),
    Figure("tier_written_bytes", "Bytes written to the tier.", lambda tier: tier.bytes_written, is_counter=True),
    Figure(
        "tier_read_seconds",
        "Time in which at least one read was under way.",
        lambda tier: tier.read_seconds,
        is_counter=True,
    ),
    Figure(
        "tier_write_seconds",
        "Time in which at least one write was under way.",
        lambda tier: tier.write_seconds,
        is_counter=True,
    ),
    Figure(
        "tier_damaged_blocks",
        "Reads that found a damaged block.",
        lambda tier: tier.damaged_blocks,
        is_counter=True,
        tiers=_NVME,
    ),
    Figure(
        "tier_bad_bytes",
        "Bytes that are never used again, because damage was found there.",
        lambda tier: tier.bad_bytes,
        tiers=_NVME,
    ),
    Figure(
        "tier_scrubbed_bytes",
        "Bytes verified in the background.",
        lambda tier: tier.scrubbed_bytes,
        is_counter=True,
        tiers=_NVME,
    ),
    Figure(
        "tier_scrub_passes",
        "How often all bytes were verified in the background.",
        lambda tier: tier.scrub_passes,
        is_counter=True,
        tiers=_NVME,
    ),
)

DEVICES: tuple[Figure[admin_pb.TierInfo.Device], ...] = (
    Figure("device_used_bytes", "Allocated bytes of the data file.", lambda device: device.used_bytes),
    Figure("device_size_bytes", "The size of the data file.", lambda device: device.size_bytes),
    Figure("device_inflight_bytes", "Bytes at the device now.", lambda device: device.bytes_in_flight),
    Figure(
        "device_busy_seconds",
        "Time in which reads were under way, plus time in which writes were.",
        lambda device: device.busy_seconds,
        is_counter=True,
    ),
    Figure("device_stalled_seconds", "Age of the oldest request at the device.", lambda device: device.stalled_seconds),
    Figure(
        "device_bandwidth_bytes_per_second",
        "Measured speed, by which new bytes are spread.",
        lambda device: device.bytes_per_second if device.HasField("bytes_per_second") else None,
    ),
)

LENDERS: tuple[Figure[admin_pb.TierInfo.Lender], ...] = (
    Figure("lender_used_bytes", "Bytes that lie in the lender's memory.", lambda lender: lender.used_bytes),
    Figure("lender_size_bytes", "The size of the loan; 0 if the lender is away.", lambda lender: lender.size_bytes),
    Figure("lender_hits", "Reads that the lender served.", lambda lender: lender.hits, is_counter=True),
    Figure("lender_misses", "Reads of copies that the lender had lost.", lambda lender: lender.misses, is_counter=True),
    Figure(
        "lender_wrong_blocks",
        "Reads whose bytes were not those that the daemon had sent.",
        lambda lender: lender.wrong_blocks,
        is_counter=True,
    ),
    Figure(
        "lender_timeouts",
        "How often the lender did not answer in time.",
        lambda lender: lender.timeouts,
        is_counter=True,
    ),
    Figure("lender_losses", "How often the loan was lost.", lambda lender: lender.losses, is_counter=True),
    Figure(
        "lender_bandwidth_bytes_per_second",
        "Measured speed of reads from the lender.",
        lambda lender: lender.bytes_per_second or None,
    ),
)

DAEMON: tuple[Figure[admin_pb.GetTiersResponse], ...] = (
    Figure("transfer_bytes", "Bytes of chunks that the daemon holds for clients.", lambda all_: all_.transfer_bytes),
    Figure("transfer_budget_bytes", "Most bytes of such chunks.", lambda all_: all_.transfer_budget_bytes),
    Figure(
        "event_loop_stalls",
        "How often the event loop was blocked for more than 100 ms.",
        lambda all_: all_.loop_stalls,
        is_counter=True,
    ),
    Figure("event_loop_longest_stall_seconds", "The longest such stall.", lambda all_: all_.longest_loop_stall_seconds),
)

JOBS: tuple[Figure[admin_pb.JobInfo], ...] = (
    Figure("job_sessions", "Attached sessions.", lambda job: job.sessions),
    Figure("job_parameters", "Elements of this node's parameters.", lambda job: job.parameters),
    Figure("job_kept_steps", "Kept steps.", lambda job: job.kept_steps),
    Figure(
        "job_committed_step",
        "The newest committed step.",
        lambda job: job.committed_step if job.HasField("committed_step") else None,
    ),
    Figure(
        "job_durable_step",
        "The newest durable step.",
        lambda job: job.durable_step if job.HasField("durable_step") else None,
    ),
    Figure(
        "job_committed_timestamp_seconds",
        "When the newest step was committed, in seconds since 1970.",
        lambda job: job.committed_at_unix_seconds if job.HasField("committed_at_unix_seconds") else None,
    ),
    Figure(
        "replica_lag_steps",
        "Committed steps that a replica of the job lacks: the largest number of all its replicas.",
        lambda job: max((replica.lag_steps for replica in job.replicas), default=None),
    ),
    Figure(
        "replica_lag_seconds",
        "For how long a replica of the job has lacked a committed step: the longest time of all its replicas.",
        lambda job: max((replica.lag_seconds for replica in job.replicas), default=None),
    ),
)

SESSIONS: tuple[Figure[Sequence[admin_pb.SessionInfo]], ...] = (
    Figure("sessions", "Sessions of clients.", len),
    Figure(
        "sessions_detached",
        "Sessions whose stream broke, and that end unless the client resumes them.",
        lambda sessions: sum(session.detached for session in sessions),
    ),
    Figure("sessions_read_leases", "Leases for reading.", lambda sessions: sum(s.read_leases for s in sessions)),
    Figure("sessions_write_leases", "Leases for writing.", lambda sessions: sum(s.write_leases for s in sessions)),
    Figure("sessions_readers", "Open readers.", lambda sessions: sum(session.readers for session in sessions)),
    Figure(
        "sessions_silent_seconds",
        "The longest time for which a client has not been heard of.",
        lambda sessions: max((session.heard_seconds_ago for session in sessions), default=0.0),
    ),
)


def tier_families(tiers: Sequence[admin_pb.TierInfo]) -> Iterable[Metric]:
    """Yield the metrics of all tiers, and those of their devices and lenders."""
    for figure in TIERS:
        having = [tier for tier in tiers if not figure.tiers or tier.tier in figure.tiers]
        yield figure.family(("tier",), [((word_of(pb.Tier, tier.tier),), tier) for tier in having])
    devices = [device for tier in tiers for device in tier.devices]
    for of_device in DEVICES:
        yield of_device.family(("path",), [((device.path,), device) for device in devices])
    lenders = [lender for tier in tiers for lender in tier.lenders]
    for of_lender in LENDERS:
        yield of_lender.family(("lender",), [((lender.address,), lender) for lender in lenders])


def job_families(jobs: Sequence[admin_pb.JobInfo]) -> Iterable[Metric]:
    """Yield the metrics of the given jobs, each with the name of the job as its label."""
    for figure in JOBS:
        yield figure.family(("job",), [((job.name,), job) for job in jobs])
    size = GaugeMetricFamily(f"{PREFIX}job_bytes", JOB_BYTES_MEANING, labels=("job", "tier"))
    for job in jobs:
        for part in job.bytes:
            size.add_metric((job.name, word_of(pb.Tier, part.tier)), part.bytes)
    yield size


JOB_BYTES_MEANING = "Bytes of the job on the tier."
# The name of the counter of lost sessions. The collector makes this metric itself, because a session that has ended has
# no reading from which the tables above could make it.
LOST_SESSIONS = f"{PREFIX}sessions_lost"
LOST_SESSIONS_MEANING = "Sessions that ended because the client was silent, or did not come back after a break."


def meanings() -> Mapping[str, str]:
    """Return the meaning of each metric in this module by its full name."""
    figures: tuple[Figure[Any], ...] = (*TIERS, *DEVICES, *LENDERS, *DAEMON, *JOBS, *SESSIONS)
    own = {f"{PREFIX}job_bytes": JOB_BYTES_MEANING, f"{LOST_SESSIONS}_total": LOST_SESSIONS_MEANING}
    return {figure.full_name: figure.meaning for figure in figures} | own
