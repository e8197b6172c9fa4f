"""Requests that no honest client sends: the daemon answers each with a status code and a reason, and serves on as
before."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind
from tests.faults.fuzz_calls import METHODS
from tests.integration.support.daemon import CHANNEL_OPTIONS, Daemon
from tests.integration.support.store_client import Clients, Rank, group_to_wire, refused
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
HUGE = (1 << 64) - 1
Call = Callable[[Rank], Any]


def slab(group: str = "block.0", kind: Any = pb.KIND_PARAM) -> pb.SlabName:
    return pb.SlabName(group=group, kind=kind)


def want(**fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"slab": slab(), "mode": pb.LEASE_MODE_READ} | fields
    return {"wants": [pb.AcquireLeasesRequest.Want(**given)]}


def group(**changes: Any) -> dict[str, Any]:
    message = group_to_wire(Layout(numels=(5_000, 17)).group("extra"))
    for shard in message.shards:
        shard.fqn = shard.fqn.replace("extra", "block.0")
    for field, value in changes.items():
        setattr(message, field, value)
    return {"groups": [message]}


def update(rank: Rank, **changes: Any) -> None:
    """Call ApplyGradients with a good lease and one bad field, and release the lease."""
    lease = rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    try:
        rank.apply(1, lease, **({"group": "block.0"} | changes))
    finally:
        rank.release(lease)


def update_twice(rank: Rank) -> None:
    """Hand a gradient over, hand the same gradient over again, and withdraw both."""
    lease = rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    rank.apply(1, lease, group="block.0", provisional=True)
    try:
        rank.apply(1, lease, group="block.0")
    finally:
        rank.call("WithdrawUpdates", step=1, groups=["block.0"])
        rank.release(lease)


def use_parked(rank: Rank) -> None:
    """Park a gradient, recall it, acquire it without parking it first, and release it."""
    lease = rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    rank.call("ParkGradients", lease_ids=[lease.lease_id, lease.lease_id])
    recalled = rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    assert recalled.lease_id == lease.lease_id
    try:
        rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    finally:
        rank.release(recalled)


def park_other(rank: Rank) -> None:
    """Park a lease that is not for a gradient, and release it."""
    lease = rank.acquire("block.0", Kind.PARAM, pb.LEASE_MODE_READ)
    try:
        rank.call("ParkGradients", lease_ids=[lease.lease_id])
    finally:
        rank.release(lease)


def withdraw(rank: Rank, step: int) -> None:
    """Hand a gradient over in step 1, try to withdraw it from step `step`, and withdraw it."""
    lease = rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    rank.apply(1, lease, group="block.0", provisional=True)
    try:
        rank.call("WithdrawUpdates", step=step, groups=["block.0"])
    finally:
        rank.call("WithdrawUpdates", step=1, groups=["block.0"])
        rank.release(lease)


def acquire(rank: Rank, **fields: Any) -> None:
    rank.call("AcquireLeases", **want(**fields))


def no_session(rank: Rank) -> None:
    rank.store.CommitStep(pb.CommitStepRequest(session_id="0" * 32, step=1), timeout=10)


def one_good_one_bad(rank: Rank) -> None:
    rank.call("AcquireLeases", wants=[*want()["wants"], *want(slab=slab("nothing"))["wants"]])


REQUESTS: dict[str, tuple[grpc.StatusCode, str, Call]] = {
    "unknown session": (CODE.NOT_FOUND, "session is unknown", no_session),
    "job opened twice": (CODE.FAILED_PRECONDITION, "has opened a job already", lambda r: r.open()),
    "lease kind 0": (CODE.INVALID_ARGUMENT, "kind has the value 0", lambda r: acquire(r, slab=slab(kind=0))),
    "lease kind 77": (CODE.INVALID_ARGUMENT, "kind has the value 77", lambda r: acquire(r, slab=slab(kind=77))),
    "lease mode 77": (CODE.INVALID_ARGUMENT, "lease mode 77", lambda r: acquire(r, mode=77)),
    "lease mode 0": (CODE.INVALID_ARGUMENT, "lease mode 0", lambda r: acquire(r, mode=0)),
    "lease without slab": (CODE.INVALID_ARGUMENT, "kind has the value 0", lambda r: acquire(r, slab=None)),
    "lease on nothing": (CODE.NOT_FOUND, "no shard group 'nothing'", lambda r: acquire(r, slab=slab("nothing"))),
    "lease on a path": (CODE.NOT_FOUND, "'../../etc'", lambda r: acquire(r, slab=slab("../../etc"))),
    "lease on a kind it lacks": (
        *(CODE.NOT_FOUND, "has no slab of kind master"),
        lambda r: acquire(r, slab=slab(kind=pb.KIND_MASTER)),
    ),
    "write lease for a huge step": (
        *(CODE.INVALID_ARGUMENT, f"wants.step is {HUGE}; at most"),
        lambda r: acquire(r, mode=pb.LEASE_MODE_WRITE, step=HUGE),
    ),
    "one good want, one bad": (CODE.NOT_FOUND, "'nothing'", one_good_one_bad),
    "release of no lease": (CODE.NOT_FOUND, "lease 0 is not held", lambda r: r.release(pb.Lease())),
    "release of a huge lease": (CODE.NOT_FOUND, f"lease {HUGE}", lambda r: r.release(pb.Lease(lease_id=HUGE))),
    "write lease for a committed step": (
        *(CODE.FAILED_PRECONDITION, "step 0 cannot be prepared, the next one is 1"),
        lambda r: acquire(r, mode=pb.LEASE_MODE_WRITE, step=0),
    ),
    "lease at a huge position": (
        *(CODE.INVALID_ARGUMENT, f"wants.position is {HUGE}; at most"),
        lambda r: acquire(r, position=HUGE),
    ),
    "too many leases": (
        *(CODE.INVALID_ARGUMENT, "wants has 16385 entries; at most 16384"),
        lambda r: r.call("AcquireLeases", wants=want()["wants"] * 16_385),
    ),
    "too many releases": (
        *(CODE.INVALID_ARGUMENT, "releases has 16385 entries; at most 16384"),
        lambda r: r.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release()] * 16_385),
    ),
    "release until a huge position": (
        *(CODE.INVALID_ARGUMENT, f"next_use is {HUGE}; at most"),
        lambda r: r.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release(next_use=HUGE)]),
    ),
    "prefetch of nothing": (
        *(CODE.NOT_FOUND, "'nothing'"),
        lambda r: r.call("Prefetch", wants=[pb.PrefetchRequest.Want(slab=slab("nothing"), position=1)]),
    ),
    "prefetch at a huge position": (
        *(CODE.INVALID_ARGUMENT, f"wants.position is {HUGE}; at most"),
        lambda r: r.call("Prefetch", wants=[pb.PrefetchRequest.Want(slab=slab(), position=HUGE)]),
    ),
    "too large a prefetch window": (
        *(CODE.INVALID_ARGUMENT, "wants has 16385 entries; at most 16384"),
        lambda r: r.call("Prefetch", wants=[pb.PrefetchRequest.Want(slab=slab())] * 16_385),
    ),
    "group of a parameter that is not there": (
        *(CODE.INVALID_ARGUMENT, "a shard of 'extra.weight.0', which is no parameter of job"),
        lambda r: r.call("RegisterShards", groups=[group_to_wire(Layout().group("extra"))]),
    ),
    "group after the job was stored": (
        *(CODE.FAILED_PRECONDITION, "no shard group 'extra'"),
        lambda r: r.call("RegisterShards", **group()),
    ),
    "group of huge size": (
        *(CODE.INVALID_ARGUMENT, f"numel {HUGE}"),
        lambda r: r.call("RegisterShards", **group(numel=HUGE)),
    ),
    "group of no size": (CODE.INVALID_ARGUMENT, "numel 0", lambda r: r.call("RegisterShards", **group(numel=0))),
    "group name unprintable": (
        *(CODE.INVALID_ARGUMENT, "groups.name must be"),
        lambda r: r.call("RegisterShards", **group(name="\x1b[2J")),
    ),
    "layout without a name": (
        *(CODE.INVALID_ARGUMENT, "layout '' of OpenJob, first_step 5: name the layout"),
        lambda r: r.call("BeginLayout", first_step=5),
    ),
    "layout from a huge step": (
        *(CODE.INVALID_ARGUMENT, f"first_step is {HUGE}; at most"),
        lambda r: r.call("BeginLayout", first_step=HUGE),
    ),
    "reader of no layout": (
        *(CODE.NOT_FOUND, "has no layout 'nothing'"),
        lambda r: r.call("OpenReader", job=r.layout.name, layout="nothing"),
    ),
    "tensors of no layout": (
        *(CODE.NOT_FOUND, "has no layout 'nothing'"),
        lambda r: r.call("ListStoredTensors", job=r.layout.name, layout="nothing"),
    ),
    "client state of no reader": (
        *(CODE.NOT_FOUND, f"reader {HUGE} is not open"),
        lambda r: r.call("ReadClientState", reader_id=HUGE),
    ),
    "client state of no rank": (
        *(CODE.NOT_FOUND, "has no client state of rank 7 on this node"),
        lambda r: r.call("ReadClientState", reader_id=r.call("OpenReader", job=r.layout.name).reader_id, rank=7),
    ),
    "gradients without a lease": (CODE.NOT_FOUND, "lease 0", lambda r: r.apply(1, pb.Lease(), group="block.0")),
    "gradients for another group": (
        *(CODE.FAILED_PRECONDITION, "is not for the gradient of group 'block.1'"),
        lambda r: update(r, group="block.1"),
    ),
    "scale not finite": (CODE.INVALID_ARGUMENT, "grad_scale inf", lambda r: update(r, grad_scale=float("inf"))),
    "hyper-parameter index": (
        *(CODE.INVALID_ARGUMENT, "index below"),
        lambda r: update(r, hyper_parameters_of_shard=[1 << 30] * 2),
    ),
    "optimizer unset": (
        *(CODE.INVALID_ARGUMENT, "optimizer is not set"),
        lambda r: r.call("ApplyGradients", step=1, hyper_parameters=[pb.ApplyGradientsRequest.HyperParameters()]),
    ),
    "commit of the same step": (CODE.FAILED_PRECONDITION, "the next one is 1", lambda r: r.commit(0)),
    "commit of a huge step": (CODE.INVALID_ARGUMENT, f"step is {HUGE}; at most", lambda r: r.commit(HUGE)),
    "large client state": (
        *(CODE.INVALID_ARGUMENT, "client_state has 2097153 bytes; at most 2097152"),
        lambda r: r.call("CommitStep", step=1, client_state=bytes((2 << 20) + 1)),
    ),
    "gradients of a huge step": (
        *(CODE.INVALID_ARGUMENT, f"step is {HUGE}; at most"),
        lambda r: r.call("ApplyGradients", step=HUGE),
    ),
    "settled above the step": (CODE.INVALID_ARGUMENT, "settled_step 9", lambda r: r.commit(1, settled_step=9)),
    "a gradient that was handed over": (
        *(CODE.FAILED_PRECONDITION, "was handed over already; withdraw that update first"),
        update_twice,
    ),
    "a gradient that is not parked": (*(CODE.FAILED_PRECONDITION, "is leased by this session already"), use_parked),
    "parking of other bytes": (
        *(CODE.FAILED_PRECONDITION, "is not for a gradient or an activation; only those are parked"),
        park_other,
    ),
    "parking of no lease": (
        *(CODE.NOT_FOUND, "lease 99 is not held by this session"),
        lambda r: r.call("ParkGradients", lease_ids=[99]),
    ),
    "withdrawal of nothing": (
        *(CODE.FAILED_PRECONDITION, "has no update of this session that can be withdrawn"),
        lambda r: r.call("WithdrawUpdates", step=1, groups=["block.0"]),
    ),
    "withdrawal from another step": (
        *(CODE.FAILED_PRECONDITION, "step 2 cannot be prepared, step 1 is under way"),
        lambda r: withdraw(r, 2),
    ),
    "withdrawal from a huge step": (
        *(CODE.INVALID_ARGUMENT, f"step is {HUGE}; at most"),
        lambda r: withdraw(r, HUGE),
    ),
    "roll-back to a later step": (CODE.NOT_FOUND, "step 7; it holds: 0", lambda r: r.call("RollBack", step=7)),
    "roll-back to a huge step": (
        *(CODE.INVALID_ARGUMENT, f"step is {HUGE}; at most"),
        lambda r: r.call("RollBack", step=HUGE),
    ),
    "page token": (
        *(CODE.INVALID_ARGUMENT, "page_token '-1'"),
        lambda r: r.admin.ListShards(admin_pb.ListShardsRequest(job=r.layout.name, page_token="-1")),
    ),
    "huge page token": (
        *(CODE.INVALID_ARGUMENT, "page_token"),
        lambda r: r.admin.ListShards(admin_pb.ListShardsRequest(job=r.layout.name, page_token="9" * 9000)),
    ),
    "page size": (
        *(CODE.INVALID_ARGUMENT, "page_size 4294967295 is above"),
        lambda r: r.admin.ListShards(admin_pb.ListShardsRequest(job=r.layout.name, page_size=(1 << 32) - 1)),
    ),
    "watch at no interval": (
        *(CODE.INVALID_ARGUMENT, "interval_seconds nan"),
        lambda r: next(r.admin.WatchTiers(admin_pb.WatchTiersRequest(interval_seconds=float("nan")))),
    ),
    "session without hello": (
        *(CODE.INVALID_ARGUMENT, "the first message of a session must be hello"),
        lambda r: next(r.store.Session(iter([pb.SessionRequest(heartbeat=pb.Heartbeat())]))),
    ),
    "session of nobody": (
        *(CODE.INVALID_ARGUMENT, "hello.client must be"),
        lambda r: next(r.store.Session(iter([pb.SessionRequest(hello=pb.SessionRequest.Hello())]))),
    ),
    "message beyond the limit": (
        *(CODE.RESOURCE_EXHAUSTED, "larger than max"),
        lambda r: r.call("CommitStep", step=1, client_state=bytes(17 << 20)),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_hostile_request_is_refused_and_changes_nothing(
    clients: Clients, daemon: Daemon, job: str, name: str
) -> None:
    code, named, call = REQUESTS[name]
    rank = clients.rank(Layout(name=job, numels=(5_000, 17), groups=("block.0", "block.1"))).begin()
    with refused(code, named):
        call(rank)
    # The same session goes on as if the request had not been made.
    rank.train(1, 2)
    rank.assert_at(2)
    assert "Traceback" not in daemon.log


OPEN_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "no job": ("job must be 1 to 1024 bytes", {"job": ""}),
    "job of control characters": ("job must be", {"job": "a\x00b"}),
    "no run": ("run_id must be", {"run_id": ""}),
    "resume 0": ("resume has the value 0", {"resume": 0}),
    "resume 9": ("resume has the value 9", {"resume": 9}),
    "rank too high": ("rank 4294967295 is not below world_size 1", {"rank": (1 << 32) - 1}),
    "layout of two lines": ("layout must be 1 to 1024 bytes", {"layout": "a\nb"}),
    "world of none": ("world_size 0", {"world_size": 0}),
    "durability unset": ("durability is not set", {"durability": pb.Durability()}),
    "dtype 9": ("dtype of parameter 'w' has the value 9", {"parameters": [pb.Parameter(fqn="w", dtype=9)]}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OPEN_FIELDS)
def test_a_malformed_job_is_refused_and_leaves_no_job(clients: Clients, job: str, name: str) -> None:
    named, changes = OPEN_FIELDS[name]
    rank = clients.rank(Layout(name=job, numels=(16,), groups=("a",)))
    with refused(CODE.INVALID_ARGUMENT, named):
        rank.open(**changes)
    assert not rank.admin.ListJobs(admin_pb.ListJobsRequest()).jobs
    rank.begin()


def test_calls_out_of_order_are_refused(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, numels=(16,), groups=("a",)))
    early: list[tuple[str, dict[str, Any]]] = [
        ("RegisterShards", group()),
        ("Prefetch", {}),
        ("CommitStep", {}),
        ("RollBack", {}),
        ("BeginLayout", {"first_step": 1}),
        ("ListVersions", {}),
        ("ApplyGradients", {}),
        ("WithdrawUpdates", {"step": 1, "groups": ["block.0"]}),
        ("AcquireLeases", want()),
    ]
    for method, fields in early:
        with refused(CODE.FAILED_PRECONDITION, "this session has not opened a job; call OpenJob first"):
            rank.call(method, **fields)
    rank.open()
    with refused(CODE.NOT_FOUND, "no shard group 'a'", "register it first"):
        rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
    rank.register()
    with refused(CODE.FAILED_PRECONDITION, "a/param has no initial values; publish them before step 0 is committed"):
        rank.commit(0)
    with refused(CODE.FAILED_PRECONDITION, "step 1 cannot be prepared, the next one is 0"):
        rank.commit(1)
    rank.stage_all()
    rank.commit(0)
    rank.assert_at(0)


def test_gradients_for_step_0_are_refused(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, numels=(16,), groups=("a",)))
    rank.open()
    rank.register()
    rank.stage_all()
    lease = rank.acquire("a", Kind.GRAD, pb.LEASE_MODE_WRITE)
    with refused(CODE.FAILED_PRECONDITION, "step 0 takes initial values and nothing else"):
        rank.apply(0, lease, group="a", hyper_parameters_of_shard=[-1])
    rank.commit(0)
    rank.assert_at(0)


def test_bytes_that_are_no_grpc_do_no_harm(clients: Clients, daemon: Daemon, job: str) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100, b""):
        for path in (str(daemon.socket), f"{daemon.socket}.arena"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(path)
                stranger.settimeout(5)
                try:
                    stranger.sendall(noise)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 16):
                        pass
                except OSError:
                    pass  # The daemon closed the connection.
    clients.rank(Layout(name=job, numels=(16,), groups=("a",))).begin()
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("path", METHODS)
def test_bytes_that_are_no_message_are_refused_without_a_stack_in_the_log(daemon: Daemon, path: str) -> None:
    method = METHODS[path]
    kinds = "stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary"
    with channel_to(daemon.address, options=CHANNEL_OPTIONS) as channel:
        call = getattr(channel, "_".join(kinds))(path)
        request = iter([b"\xff" * 9]) if method.client_streaming else b"\xff" * 9
        with refused(CODE.INVALID_ARGUMENT):
            answer = call(request, timeout=20)
            next(answer)
    assert "Traceback" not in daemon.log


def test_a_refusal_is_short_however_long_the_name_is(clients: Clients) -> None:
    client = clients.client()
    for name, named in (("x" * 1024, "x..."), ("\N{SNOWMAN}" * 341, "\N{SNOWMAN}" * 341)):
        with refused(CODE.NOT_FOUND, named):
            client.admin.DeleteJob(admin_pb.DeleteJobRequest(job=name), timeout=20)


def test_a_client_that_goes_while_it_is_refused_leaves_no_stack_in_the_log(daemon: Daemon) -> None:
    with channel_to(daemon.address, options=CHANNEL_OPTIONS) as channel:
        session: Any = channel.stream_stream("/paramserver.v1.ParameterStore/Session")
        for _ in range(200):
            session(iter([b""])).cancel()
    assert "Traceback" not in daemon.log
