"""The deletion of jobs that former starts have left under names which no user has chosen: accelerate-DATE-TIME-HEX.

Each start of a program without a chosen name makes a job, and without deletions these jobs would fill the budget of the
job's own daemon. The rule, which is also on the page about resumes: of the starts of one name, the three newest that
have made at least 100 steps stay. If fewer than three have made 100 steps, the newest other starts fill the three
places. All further starts are deleted. So a start with fewer than 100 steps never takes the place of one with more,
however often a program crashes. If NVMe has no room for the new job, the starts that stay are deleted as well, first
those with fewer than 100 steps, and of these the oldest first. A line of the log names each job that is deleted. This
module owns the rule. It must never delete a job that is in use, one that keeps steps for checkpoints, or one in a
daemon of an operator, where programs of others have jobs with such names, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence

import grpc

from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_pb_grpc
from paramserver.v1.parameter_store_pb2 import TIER_NVME
from trainer_client.client.transport.channel import open_channel
from trainer_client.errors import StoreUnavailableError

log = logging.getLogger(__name__)

_START = re.compile(r"(.+)-(\d{8}-\d{6}-[0-9a-f]{6})(?:\.\d+)?")
_KEPT_STARTS = 3
_STEPS_THAT_COUNT = 100
# The bytes of NVMe that a job takes for each parameter: two steps, each with a weight, a master weight and two moments.
# Jobs of former starts are deleted until this much is free for each parameter of the new start.
_BYTES_PER_PARAMETER = 28
_CALL_SECONDS = 30.0


def remove_former_starts(address: str, job: str, parameters: int) -> None:
    """Delete the jobs that the rule of this module does not keep, before the job of a new start is made.

    A failure is only logged, because the new start can go on without the deletions.

    Args:
        address: the daemon that belongs to this job.
        job: the job of the new start. Nothing is deleted if a user has chosen its name.
        parameters: the number of parameters of the new job.
    """
    found = _START.fullmatch(job)
    if found is None:
        return
    try:
        with open_channel(address) as channel:
            _remove(admin_pb_grpc.StoreAdminStub(channel), found[1], job, parameters)
    except (grpc.RpcError, StoreUnavailableError) as error:
        log.warning("jobs of former starts are not deleted: %s", error)


def _remove(admin: admin_pb_grpc.StoreAdminStub, base: str, own: str, parameters: int) -> None:
    listed = admin.ListJobs(admin_pb.ListJobsRequest(), timeout=_CALL_SECONDS).jobs
    steps = {
        job.name: job.committed_step
        for job in listed
        if job.name != own and not job.kept_steps and not job.sessions and _date(job.name, base)
    }
    going = beyond(steps, base)
    for name in going:
        _delete(admin, name, steps[name], f"the {_KEPT_STARTS} starts that stay are other ones")
    staying = [name for name in in_order(steps, base) if name not in going]
    for name in staying if parameters else ():
        if _free_bytes(admin) >= _BYTES_PER_PARAMETER * parameters:
            return
        _delete(admin, name, steps[name], "nvme_budget has no room for it beside the job of this start")


def _date(name: str, base: str) -> str:
    found = _START.fullmatch(name)
    return found[2] if found is not None and found[1] == base else ""


def in_order(steps: Mapping[str, int], base: str) -> Sequence[str]:
    """Return the starts of `base` in the order of deletion: first those with few steps, and of these the oldest."""
    return sorted(steps, key=lambda name: (steps[name] >= _STEPS_THAT_COUNT, _date(name, base), name))


def beyond(steps: Mapping[str, int], base: str) -> Sequence[str]:
    """Return the starts of `base` that the rule of this module deletes. `steps` has each start's number of steps."""
    return in_order(steps, base)[: max(0, len(steps) - _KEPT_STARTS)]


def _free_bytes(admin: admin_pb_grpc.StoreAdminStub) -> int:
    return next(_free_of_nvme(admin.GetTiers(admin_pb.GetTiersRequest(), timeout=_CALL_SECONDS)), 0)


def _free_of_nvme(reading: admin_pb.GetTiersResponse) -> Iterator[int]:
    return (tier.budget_bytes - tier.used_bytes for tier in reading.tiers if tier.tier == TIER_NVME)


def _delete(admin: admin_pb_grpc.StoreAdminStub, name: str, step: int, why: str) -> None:
    try:
        admin.DeleteJob(admin_pb.DeleteJobRequest(job=name), timeout=_CALL_SECONDS)
    except grpc.RpcError as error:
        log.warning("job %r of a former start is not deleted: %s", name, error)
        return
    log.warning("paramserver: job %r of a former start, at step %d, is deleted, because %s", name, step, why)
