"""What a step of a job takes, and what binds it, as the store sees it.

A roofline: the least time that each resource of the store needed for a step, beside the time that the step took. What
the trainers do meanwhile is not seen here; `engine.step_report()` of the trainer has that. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from paramserver.page.steps import Step
from storage.tracing import Activity

# The last steps of a job of which the means are taken.
MEASURED_STEPS = 16
# The time over which the steps of a minute are counted.
RATE_SECONDS = 300.0
# From this part of the step on, the resource that needs longest is said to bind the step.
BINDING_FRACTION = 0.7
# From this part of the step on, waiting for bytes is said to bind a step that no resource binds.
WAITING_FRACTION = 0.3


def steps_per_minute(steps: Sequence[Step], now: float) -> float | None:
    """Return how many steps a job commits in a minute, over the steps that are kept or the last RATE_SECONDS.

    Args:
        steps: the job's last steps, oldest first.
        now: the time on the clock of time.monotonic().

    Returns:
        The rate; None: fewer than two steps are known, so there is none.
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
        bandwidth: the bytes per second that were measured of the devices; 0: none is measured yet.

    Returns:
        The fields that docs/page.md lists; None: there is no step whose time is known.
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
        # Nothing takes no time at any speed.
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
    """Return what binds a step, and which part of it that needs; None: the devices' speed is not known yet."""
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
