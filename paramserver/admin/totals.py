"""The sums of the answers of several daemons, in the form of the answer of one.

Sizes, counters and numbers of things are added. What cannot be added, such as a path, is left empty. This module owns
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb

MessageT = TypeVar("MessageT", bound=Message)

_FIGURES = (
    *(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_INT64),
    *(FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT),
)


def tiers(answers: Sequence[admin_pb.GetTiersResponse]) -> admin_pb.GetTiersResponse:
    """Return each tier with the sums of all daemons, and with the problems, devices, loans and lenders of all."""
    total = _added(admin_pb.GetTiersResponse(), answers)
    total.unix_seconds = min(answer.unix_seconds for answer in answers)
    total.longest_loop_stall_seconds = max(answer.longest_loop_stall_seconds for answer in answers)
    for same in _grouped((tier for answer in answers for tier in answer.tiers), lambda tier: tier.tier):
        tier = _added(admin_pb.TierInfo(tier=same[0].tier), same)
        tier.problems.extend(problem for one in same for problem in one.problems)
        tier.devices.extend(device for one in same for device in one.devices)
        tier.loans.extend(loan for one in same for loan in one.loans)
        tier.lenders.extend(lender for one in same for lender in one.lenders)
        total.tiers.append(tier)
    return total


def accounts(answers: Sequence[admin_pb.GetAccountsResponse]) -> admin_pb.GetAccountsResponse:
    """Return the account of each tier with the sums of all daemons.

    The total of a tier is settled only if that tier's account is settled at each daemon.
    """
    total = admin_pb.GetAccountsResponse()
    for same in _grouped((account for answer in answers for account in answer.accounts), lambda account: account.tier):
        account = _added(admin_pb.TierAccount(tier=same[0].tier, settled=all(one.settled for one in same)), same)
        held = (holding for one in same for holding in one.holdings)
        for of_holder in _grouped(held, lambda holding: holding.holder):
            account.holdings.append(_added(admin_pb.TierAccount.Holding(holder=of_holder[0].holder), of_holder))
        total.accounts.append(account)
    return total


def jobs(answers: Sequence[admin_pb.ListJobsResponse]) -> admin_pb.ListJobsResponse:
    """Return each job with the sums of all daemons. Its newest step is the lowest of the daemons' newest steps."""
    total = admin_pb.ListJobsResponse()
    for same in _grouped((job for answer in answers for job in answer.jobs), lambda job: job.name):
        job = total.jobs.add(
            name=same[0].name,
            world_size=max(one.world_size for one in same),
            sessions=sum(one.sessions for one in same),
            parameters=sum(one.parameters for one in same),
            durability=same[0].durability,
            created_at_unix_seconds=min(one.created_at_unix_seconds for one in same),
            kept_steps=max(one.kept_steps for one in same),
            bytes=_tier_bytes(entry for one in same for entry in one.bytes),
            replicas=[replica for one in same for replica in one.replicas],
        )
        for field in ("committed_step", "durable_step", "committed_at_unix_seconds"):
            if all(one.HasField(field) for one in same):
                setattr(job, field, min(getattr(one, field) for one in same))
        # Ranks have committed a settled step on all nodes, so the newest settled step that any daemon reports is the
        # job's.
        if settled := [one.settled_step for one in same if one.HasField("settled_step")]:
            job.settled_step = max(settled)
    return total


def sessions(answers: Sequence[admin_pb.ListSessionsResponse]) -> admin_pb.ListSessionsResponse:
    """Return the sessions of all daemons."""
    return admin_pb.ListSessionsResponse(sessions=[session for answer in answers for session in answer.sessions])


def steps(answers: Sequence[admin_pb.ListStepsResponse]) -> admin_pb.ListStepsResponse:
    """Return each step, by layout and number, with the bytes of all daemons.

    A flag of a step is set if all daemons set it. `settled` alone is set if one daemon sets it, because that daemon
    knows that all nodes have committed the step.
    """
    total = admin_pb.ListStepsResponse()
    found = (step for answer in answers for step in answer.steps)
    for same in _grouped(found, lambda step: (step.step, step.layout)):
        total.steps.add(
            step=same[0].step,
            layout=same[0].layout,
            world_size=same[0].world_size,
            committed_at_unix_seconds=max(one.committed_at_unix_seconds for one in same),
            newest=all(one.newest for one in same),
            settled=any(one.settled for one in same),
            retained=all(one.retained for one in same),
            durable=all(one.durable for one in same),
            kept_as=sorted({name for one in same for name in one.kept_as}),
            readers=sum(one.readers for one in same),
            bytes=_tier_bytes(entry for one in same for entry in one.bytes),
            alone_bytes=sum(one.alone_bytes for one in same),
        )
    total.steps.sort(key=lambda step: step.step)
    return total


def prefetch(answers: Sequence[admin_pb.GetPrefetchResponse]) -> admin_pb.GetPrefetchResponse:
    """Return the sums of all queues, the windows of all daemons, and the sums of the bytes fetched for each job."""
    total = _added(admin_pb.GetPrefetchResponse(), answers)
    total.windows.extend(window for answer in answers for window in answer.windows)
    for same in _grouped((job for answer in answers for job in answer.jobs), lambda job: job.job):
        total.jobs.append(_added(admin_pb.GetPrefetchResponse.Fetched(job=same[0].job), same))
    return total


def events(answers: Sequence[admin_pb.ListEventsResponse]) -> admin_pb.ListEventsResponse:
    """Return the events of all daemons in the order of their times."""
    found = sorted((event for answer in answers for event in answer.events), key=lambda event: event.unix_seconds)
    return admin_pb.ListEventsResponse(events=found)


def drain(answers: Sequence[admin_pb.GetDrainResponse]) -> admin_pb.GetDrainResponse:
    """Return the sessions for which any daemon waits. The total is ready to stop if each daemon is."""
    return admin_pb.GetDrainResponse(
        draining=all(answer.draining for answer in answers),
        since_unix_seconds=max(answer.since_unix_seconds for answer in answers),
        sessions=sum(answer.sessions for answer in answers),
        waiting=[waiting for answer in answers for waiting in answer.waiting],
        ready=all(answer.ready for answer in answers),
    )


def figures(answers: Sequence[MessageT]) -> MessageT:
    """Return a message of the same type in which each number is the sum of that field in all answers."""
    return _added(type(answers[0])(), answers)


def _added(into: MessageT, messages: Iterable[MessageT]) -> MessageT:
    """Add the number of each field that is not repeated to the same field of `into`, and return `into`."""
    fields = [f for f in into.DESCRIPTOR.fields if f.cpp_type in _FIGURES and not f.is_repeated]
    for message in messages:
        for field in fields:
            setattr(into, field.name, getattr(into, field.name) + getattr(message, field.name))
    return into


def _grouped(items: Iterable[MessageT], key: Callable[[MessageT], object]) -> list[list[MessageT]]:
    """Return the items with equal keys together, in the order in which the keys come first."""
    groups: dict[object, list[MessageT]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _tier_bytes(entries: Iterable[admin_pb.JobInfo.TierBytes]) -> list[admin_pb.JobInfo.TierBytes]:
    total: dict[pb.Tier, int] = {}
    for entry in entries:
        total[entry.tier] = total.get(entry.tier, 0) + entry.bytes
    return [admin_pb.JobInfo.TierBytes(tier=tier, bytes=nbytes) for tier, nbytes in total.items()]
