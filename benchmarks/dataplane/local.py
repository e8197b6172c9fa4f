"""Measures the data plane on one node: a lease beside a bare gRPC call, and the arena beside a copy in one process.

Both sides of each comparison take turns. `run` returns JSON-able values:

- `lease_latency`: by client (`aio`, `sync`) and shard size in MiB: microseconds of `echo` (a call of a bare grpc.aio
  server that answers the same messages), `lease` and `release` (p50, p99), and `ratio`: p50 of lease / p50 of echo
- `same_node`: seconds of both sides for each pair, and `ratio`, the median of memcpy / ours. Ours leases a shard,
  requests the next lease, copies the shard out of the arena into preallocated memory, and releases the lease; memcpy
  copies as many bytes within the process
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch
import uvloop

from benchmarks.common import store_daemon
from benchmarks.common.measure import BenchmarkError
from paramserver.contract.channel import NO_PROXY, channel_to, target_of
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.rank_store import RankStore

MIB = 1 << 20
COPIES = 16
WARM_UP_CALLS = 20
START_SECONDS = 60.0
CALL_SECONDS = 30.0

ECHO_METHOD = "/benchmark.Echo/Acquire"


def run(
    pairs: int,
    *,
    progress: Callable[[str], object],
    shard_mib: Sequence[int],
    copied_mib: int,
    calls: int,
) -> dict[str, object]:
    """Start a daemon, run all measurements, and return their results; see the module.

    Args:
        pairs: pairs of runs of `same_node`, after a warm-up.
        progress: called with the name of each measurement.
        shard_mib: sizes of the leased shards.
        copied_mib: the size of the shard that `same_node` copies; one of `shard_mib`.
        calls: calls of each kind of `lease_latency`.

    Raises:
        BenchmarkError: a lease holds wrong bytes.
        StoreError: the daemon does not serve.
    """
    # Host memory holds all shards and what a step needs besides. The job has no durable commits, so nvme stays empty.
    config = {"host_budget": f"{sum(shard_mib) + 128}MiB", "nvme_budget": "64MiB"}
    with (
        tempfile.TemporaryDirectory() as directory,
        store_daemon.started(Path(directory), config) as daemon,
        contextlib.closing(_filled_store(daemon.socket_address, shard_mib)) as store,
    ):
        progress("leases")
        latency = _lease_latency(daemon.socket_address, store.session_id, shard_mib, calls)
        progress("bytes on the same node")
        return {"lease_latency": latency, "same_node": _same_node(store, copied_mib, pairs)}


def _slab(mib: int) -> SlabName:
    return SlabName(group=f"{mib} MiB", kind=pb.KIND_PARAM)


def _filled_store(address: str, shard_mib: Sequence[int]) -> RankStore:
    """Return a connected rank whose job has a shard of each size, resident in the host tier."""
    store = RankStore(address, "benchmark")
    numels = {mib: mib * MIB // 4 for mib in shard_mib}
    store.job.open(
        pb.OpenJobRequest(
            job="benchmark",
            run_id="benchmark",
            world_size=1,
            attached_ranks=1,
            parameters=[
                pb.Parameter(fqn=f"weight.{mib}", shape=[numel], dtype=pb.DTYPE_FLOAT32)
                for mib, numel in numels.items()
            ],
            durability=pb.Durability(none=pb.Durability.Volatile()),
            resume=pb.RESUME_POLICY_NEVER,
        )
    )
    store.job.register_shards(
        pb.ShardGroup(
            name=_slab(mib).group,
            numel=numel,
            shards=[pb.Shard(fqn=f"weight.{mib}", numel=numel)],
            kinds=[pb.KindSpec(kind=pb.KIND_PARAM, dtype=pb.DTYPE_FLOAT32, placement=pb.TIER_HOST)],
        )
        for mib, numel in numels.items()
    )
    for mib in shard_mib:
        leases = store.leases.acquire_write([_slab(mib)], 0).wait()
        leases[0].data.fill_(mib % 251)
        store.leases.publish(leases)
    store.steps.commit(0, b"", 0, wait_for_copies=lambda: None).wait()
    return store


# These functions measure leases.


def _lease_latency(address: str, session_id: str, shard_mib: Sequence[int], calls: int) -> dict[str, object]:
    """Return `lease_latency` of the module's result."""
    wants = {mib: pb.AcquireLeasesRequest(session_id=session_id, wants=[_want(mib)]) for mib in shard_mib}
    with tempfile.TemporaryDirectory() as directory, _echo_server(f"unix:{directory}/echo") as echo:
        gc.disable()
        try:
            by_client = {
                "sync": _sync_calls(address, echo, wants, calls),
                "aio": uvloop.run(_aio_calls(address, echo, wants, calls)),
            }
        finally:
            gc.enable()
    return {
        client: {str(mib): _summary(times) for mib, times in by_size.items()} for client, by_size in by_client.items()
    }


def _want(mib: int) -> pb.AcquireLeasesRequest.Want:
    return pb.AcquireLeasesRequest.Want(slab=_slab(mib).to_proto(), mode=pb.LEASE_MODE_READ)


Calls = dict[str, list[float]]


def _no_calls() -> Calls:
    return {"echo": [], "lease": [], "release": []}


def _sync_calls(address: str, echo: str, wants: dict[int, pb.AcquireLeasesRequest], count: int) -> dict[int, Calls]:
    calls = {mib: _no_calls() for mib in wants}
    with channel_to(address) as channel, channel_to(echo) as bare:
        stub = pb_grpc.ParameterStoreStub(channel)
        echo_call = bare.unary_unary(ECHO_METHOD, *_serializers())
        for number in range(-WARM_UP_CALLS, count):
            for mib, request in wants.items():
                times = calls[mib] if number >= 0 else _no_calls()
                _timed(times["echo"], partial(echo_call, request, timeout=CALL_SECONDS))
                leases = _timed(times["lease"], partial(stub.AcquireLeases, request, timeout=CALL_SECONDS))
                release = _release_of(request, leases)
                _timed(times["release"], partial(stub.ReleaseLeases, release, timeout=CALL_SECONDS))
    return calls


def _aio_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target_of(address), options=NO_PROXY)


async def _aio_calls(
    address: str, echo: str, wants: dict[int, pb.AcquireLeasesRequest], count: int
) -> dict[int, Calls]:
    calls = {mib: _no_calls() for mib in wants}
    async with _aio_channel(address) as channel, _aio_channel(echo) as bare:
        stub: Any = pb_grpc.ParameterStoreStub(channel)
        echo_call = bare.unary_unary(ECHO_METHOD, *_serializers())
        for number in range(-WARM_UP_CALLS, count):
            for mib, request in wants.items():
                times = calls[mib] if number >= 0 else _no_calls()
                await _timed_async(times["echo"], _one(echo_call, request))
                leases = await _timed_async(times["lease"], _one(stub.AcquireLeases, request))
                await _timed_async(times["release"], _one(stub.ReleaseLeases, _release_of(request, leases)))
    return calls


async def _one(method: Any, request: Any) -> Any:
    return await method(request, timeout=CALL_SECONDS)


def _release_of(request: pb.AcquireLeasesRequest, leases: pb.AcquireLeasesResponse) -> pb.ReleaseLeasesRequest:
    releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id) for lease in leases.leases]
    return pb.ReleaseLeasesRequest(session_id=request.session_id, releases=releases)


def _timed(times: list[float], call: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - started)
    return result


async def _timed_async(times: list[float], call: Coroutine[Any, Any, Any]) -> Any:
    started = time.perf_counter()
    result = await call
    times.append(time.perf_counter() - started)
    return result


def _serializers() -> tuple[Callable[[pb.AcquireLeasesRequest], bytes], Callable[[bytes], pb.AcquireLeasesResponse]]:
    return pb.AcquireLeasesRequest.SerializeToString, pb.AcquireLeasesResponse.FromString


def _summary(calls: Calls) -> dict[str, object]:
    microseconds = {name: _quantiles(times) for name, times in calls.items()}
    ratio = microseconds["lease"]["p50"] / microseconds["echo"]["p50"]
    return {**microseconds, "ratio": round(ratio, 3)}


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"p50": round(cuts[49] * 1e6, 1), "p99": round(cuts[98] * 1e6, 1)}


@contextlib.contextmanager
def _echo_server(address: str) -> Iterator[str]:
    """Start a process that answers ECHO_METHOD with a message as large as the grant of a lease; yield its address."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_echo, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise BenchmarkError("the echo server does not start")
        ours.recv()
        yield address
    finally:
        process.terminate()
        process.join()
        ours.close()


def _serve_echo(address: str, ready: Connection) -> None:
    async def serve() -> None:
        lease = pb.Lease(lease_id=1000, version=1, arena_offset=1 << 28, size_bytes=256 * MIB, generation=1000)
        response = pb.AcquireLeasesResponse(leases=[lease])

        async def acquire(
            request: pb.AcquireLeasesRequest,
            context: grpc.aio.ServicerContext[pb.AcquireLeasesRequest, pb.AcquireLeasesResponse],
        ) -> pb.AcquireLeasesResponse:
            return response

        handler = grpc.unary_unary_rpc_method_handler(
            acquire, pb.AcquireLeasesRequest.FromString, pb.AcquireLeasesResponse.SerializeToString
        )
        service, method = ECHO_METHOD.strip("/").split("/")
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
        server.add_insecure_port(address)
        await server.start()
        ready.send(True)
        await server.wait_for_termination()

    uvloop.run(serve())


# These functions measure the transfer of bytes.


def _same_node(store: RankStore, copied_mib: int, pairs: int) -> dict[str, object]:
    nbytes = copied_mib * MIB
    source = torch.full((nbytes,), copied_mib % 251, dtype=torch.uint8)
    target = torch.empty_like(source)
    torch.set_num_threads(1)
    ours: list[float] = []
    memcpy: list[float] = []
    for number in range(pairs + 1):
        sides = [(ours, partial(_copy_leased, store, copied_mib, target)), (memcpy, partial(_copy, source, target))]
        for times, side in sides if number % 2 else reversed(sides):
            target.zero_()
            _timed(times, side)
            if not torch.equal(source, target):
                raise BenchmarkError("the lease holds other bytes than were put there")
    ratios = [theirs / own for own, theirs in zip(ours[1:], memcpy[1:], strict=True)]
    return {
        "bytes": nbytes * COPIES,
        "seconds": [round(seconds, 6) for seconds in ours[1:]],
        "memcpy_seconds": [round(seconds, 6) for seconds in memcpy[1:]],
        "gb_per_second": round(nbytes * COPIES / 1e9 / statistics.median(ours[1:]), 3),
        "memcpy_gb_per_second": round(nbytes * COPIES / 1e9 / statistics.median(memcpy[1:]), 3),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 4),
    }


def _copy_leased(store: RankStore, copied_mib: int, target: torch.Tensor) -> None:
    slabs = [_slab(copied_mib)]
    pending = store.leases.acquire_read(slabs, 0)
    for number in range(COPIES):
        leases = pending.wait()
        if number + 1 < COPIES:
            pending = store.leases.acquire_read(slabs, 0)
        target.copy_(leases[0].data)
        store.leases.check()
        returned = store.leases.release(leases)
    returned.wait()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    for _ in range(COPIES):
        target.copy_(source)
