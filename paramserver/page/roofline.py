"""The time that a step of a job needs of each resource of the store, and the resource that limits ("binds") the step.

This is a roofline: the least time that each resource needs for the step, beside the time that the step took. The store
does not see what the trainers do meanwhile; `engine.step_report()` of the trainer reports that. This module owns
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from paramserver.page.steps import Step
from storage.base.tracing import Activity

# The page computes a job's mean figures over at most this number of its last steps.
MEASURED_STEPS = 16
# The page computes a job's steps per minute over at most this many of the last seconds.
RATE_SECONDS = 300.0
# The page names the resource that a step uses for the longest time as the one that bounds the step, if that time is at
# least this fraction of the step's time.
BINDING_FRACTION = 0.7
# If no resource bounds the step, the page says that waiting for bytes bounds the step, if the waiting takes at least
# this fraction of the step's time.
WAITING_FRACTION = 0.3


def steps_per_minute(steps: Sequence[Step], now: float) -> float | None:
    """Return how many steps a job commits in a minute, over the steps that are kept or the last RATE_SECONDS.

    Args:
        steps: the job's last steps, oldest first.
        now: the time on the clock of time.monotonic().

    Returns:
        The rate; None if fewer than two steps are known.
    """
    if len(steps) < 2:
        return None
    since = max(steps[0].committed_at, now - RATE_SECONDS)
    before = [step.number for step in steps if step.committed_at <= since]
    return 60 * (steps[-1].number - before[-1]) / max(now - since, 1e-3)


def describe_step(steps: Sequence[Step], bandwidth: float) -> dict[str, Any] | None:
    """Return the means of the last steps, and the least time that each resource needed for one.

    Args:
        steps: the job's last steps, oldest first.
        bandwidth: the measured bandwidth of the devices in bytes per second; 0: it is not measured yet.

    Returns:
        The fields that docs/page.md lists; None if no step's time is known.
    """
    timed = [step for step in steps if step.seconds is not None][-MEASURED_STEPS:]
    seconds = [step.seconds for step in timed if step.seconds is not None]
    if not seconds:
        return None

    def mean(figure: Callable[[Step], float]) -> float:
        return fmean(map(figure, timed))

    def covered(activity: Activity) -> float:
        return mean(lambda step: step.covered_seconds[activity])

    def at_bandwidth(moved: float) -> float | None:
        # If the bandwidth was not measured, the time to move the bytes is unknown (None), except that no bytes take no
        # time.
        return moved / bandwidth if bandwidth else None if moved else 0.0

    read, all_read = mean(lambda step: step.read_bytes), mean(lambda step: step.all_read_bytes)
    written, all_written = mean(lambda step: step.written_bytes), mean(lambda step: step.all_written_bytes)
    needed = {
        "nvme_read": at_bandwidth(all_read),
        "nvme_write": at_bandwidth(all_written),
        "optimizer": covered(Activity.OPTIMIZER),
        "commit": covered(Activity.COMMIT),
    }
    waiting = covered(Activity.DEMAND_FETCH)
    binding, fraction = _binding(needed, waiting, fmean(seconds))
    return {
        "steps": len(seconds),
        "seconds": fmean(seconds),
        "median_seconds": median(seconds),
        "device_bytes_per_second": bandwidth or None,
        "read_bytes": round(read),
        "written_bytes": round(written),
        "all_read_bytes": round(all_read),
        "all_written_bytes": round(all_written),
        "reading_seconds": covered(Activity.NVME_READ),
        "writing_seconds": covered(Activity.NVME_WRITE),
        "fetch_waiting_seconds": waiting,
        "needed_seconds": needed,
        "binding": binding,
        "binding_fraction": fraction,
    }


def _binding(needed: dict[str, float | None], waiting: float, seconds: float) -> tuple[str | None, float | None]:
    """Return the name of what binds a step, and which fraction of the step's time it needs.

    Both are None if the answer depends on the devices' speed, and that speed is not known yet.
    """
    known = {name: value for name, value in needed.items() if value is not None}
    longest = max(known, key=lambda name: known[name])
    fraction = known[longest] / max(seconds, 1e-9)
    if fraction >= BINDING_FRACTION:
        return longest, fraction
    if len(known) < len(needed):
        return None, None
    if waiting >= WAITING_FRACTION * seconds:
        return "fetch_waiting", waiting / seconds
    return "trainer", fraction
