"""Measures the data plane between nodes, on one machine: a lease's bytes over gRPC and over bare TCP, in turns.

`run` returns one JSON-able object:

- `read`, `write`: `tcp` and `ours` (bytes, seconds, gb_per_second of each pair, medians; CPU of this process), `ratios`
  of the pairs and their median `ratio`: ours / tcp
- `crowd`: the speed of fast reads `alone`, and `beside` a crowd of `idle_streams` open streams and one slow reader, in
  turns; `ratio` of their medians; the daemon's `private_bytes` without the crowd, with it, and after reads beside it;
  and `bytes_per_idle_stream`
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import store_daemon
from benchmarks.common.measure import BenchmarkError, CpuStopwatch, Progress, Sample, summary
from benchmarks.common.store_daemon import StoreDaemon
from benchmarks.dataplane import bare_tcp
from paramserver.contract.malloc_settings import keep_chunk_buffers
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from trainer_client.client.transport.channel import open_channel
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.client.transport.streams import Streams

CALL_SECONDS = 120.0
MIB = 1 << 20
# The longest wait until the kernel has made as many of the arena's pages huge as it can.
SETTLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remote:
    """A client with a read lease on a slab of weights, a write lease on its gradient, and streams to both."""

    store: RankStore
    streams: Streams
    read_lease: int
    write_lease: int

    def get(self, buffer: memoryview) -> None:
        self.streams.read(pb.ReadRequest.Open(lease_id=self.read_lease), buffer, CALL_SECONDS)

    def put(self, buffer: memoryview) -> None:
        self.streams.write(self.write_lease, buffer, CALL_SECONDS)


def run(
    pairs: int, *, size_bytes: int = 256 * MIB, idle_streams: int = 1000, progress: Progress = lambda _: None
) -> dict[str, object]:
    """Run all measurements with `pairs` pairs each, and return their results; see the module.

    Raises:
        BenchmarkError: a read returned wrong bytes.
        StoreError: the daemon failed.
    """
    keep_chunk_buffers()
    with ExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        config = {"host_budget": 3 * size_bytes + 64 * MIB, "nvme_budget": 8 * size_bytes + 64 * MIB}
        daemon = cleanup.enter_context(store_daemon.started(directory, config))
        tcp = cleanup.enter_context(bare_tcp.far_end(size_bytes))
        values = torch.arange(size_bytes // 4, dtype=torch.float32).view(torch.uint8)
        remote = cleanup.enter_context(_opened(daemon, values))
        progress("waiting until the arena's pages are huge")
        _settle(daemon)
        buffer = torch.zeros(size_bytes, dtype=torch.uint8)
        view = buffer.numpy().data
        result: dict[str, object] = {
            "read": _contest("read", lambda: tcp.get(view), lambda: remote.get(view), size_bytes, pairs, progress)
        }
        remote.get(view)
        if not torch.equal(buffer, values):
            raise BenchmarkError("a read gave other bytes than were stored")
        result["write"] = _contest(
            "write", lambda: tcp.put(view), lambda: remote.put(view), size_bytes, pairs, progress
        )
        return result | {"crowd": _crowd(daemon, remote, view, idle_streams, pairs, progress)}


def _contest(
    name: str,
    theirs: Callable[[], None],
    ours: Callable[[], None],
    size_bytes: int,
    pairs: int,
    progress: Progress,
) -> dict[str, Any]:
    """Run both sides in turns, after a warm-up, and return their figures; the side that goes first changes."""
    samples: dict[Callable[[], None], list[Sample]] = {theirs: [], ours: []}
    for number in range(pairs + 1):
        progress(f"{name}: " + (f"pair {number} of {pairs}" if number else "warm-up"))
        for work in (theirs, ours) if number % 2 else (ours, theirs):
            with CpuStopwatch() as watch:
                work()
            samples[work].append(watch.sample(size_bytes))
    tcp, own = samples[theirs][1:], samples[ours][1:]
    ratios = [mine.rate / other.rate for mine, other in zip(own, tcp, strict=True)]
    return {
        "tcp": summary(tcp),
        "ours": summary(own),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def _crowd(
    daemon: StoreDaemon, remote: _Remote, view: memoryview, idle_streams: int, pairs: int, progress: Progress
) -> dict[str, Any]:
    alone: list[Sample] = []
    beside: list[Sample] = []
    memory: dict[str, list[int]] = {"alone": [], "with_crowd": [], "after_reads": []}

    def read_into(samples: list[Sample]) -> None:
        for _ in range(2):
            with CpuStopwatch() as watch:
                remote.get(view)
            samples.append(watch.sample(len(view)))

    for number in range(pairs):
        progress(f"crowd: pair {number + 1} of {pairs}")
        read_into(alone)
        memory["alone"].append(daemon.private_bytes)
        with _open_streams(daemon, remote, idle_streams):
            memory["with_crowd"].append(daemon.private_bytes)
            read_into(beside)
            memory["after_reads"].append(daemon.private_bytes)
    own, others = summary(beside), summary(alone)
    grown = statistics.median(w - a for w, a in zip(memory["with_crowd"], memory["alone"], strict=True))
    return {
        "idle_streams": idle_streams,
        "alone": others,
        "beside": own,
        "ratio": round(own["median_gb_per_second"] / others["median_gb_per_second"], 4),
        "private_bytes": memory,
        "bytes_per_idle_stream": round(grown / idle_streams),
    }


@contextmanager
def _open_streams(daemon: StoreDaemon, remote: _Remote, count: int) -> Iterator[None]:
    arguments = [daemon.address, remote.store.session_id, str(remote.read_lease), str(count)]
    command = [sys.executable, "-m", "benchmarks.dataplane.idle_streams", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise BenchmarkError("the crowd could not open its streams")
        yield


@contextmanager
def _opened(daemon: StoreDaemon, values: torch.Tensor) -> Iterator[_Remote]:
    numel = values.numel() // 4
    store = RankStore(daemon.address, "benchmark", prefer_streams=True)
    try:
        with open_channel(daemon.address) as channel:
            store.job.open(
                pb.OpenJobRequest(
                    job="benchmark",
                    run_id="run",
                    world_size=1,
                    attached_ranks=1,
                    parameters=[pb.Parameter(fqn="weight", shape=[numel], dtype=pb.DTYPE_FLOAT32, trainable=True)],
                    durability=pb.Durability(none=pb.Durability.Volatile()),
                    resume=pb.RESUME_POLICY_AUTO,
                )
            )
            kinds = [
                pb.KindSpec(kind=kind, dtype=pb.DTYPE_FLOAT32, placement=placement)
                for kind, placement in (
                    (pb.KIND_PARAM, pb.TIER_HOST),
                    (pb.KIND_EXP_AVG, pb.TIER_NVME),
                    (pb.KIND_EXP_AVG_SQ, pb.TIER_NVME),
                    (pb.KIND_GRAD, pb.TIER_HOST),
                )
            ]
            shards = [pb.Shard(fqn="weight", numel=numel)]
            store.job.register_shards([pb.ShardGroup(name="unit", numel=numel, shards=shards, kinds=kinds)])
            weights = SlabName(group="unit", kind=pb.KIND_PARAM)
            (initial,) = store.leases.acquire_write([weights], 0).wait()
            initial.data.copy_(values)
            store.leases.publish([initial])
            store.steps.commit(0, b"", 0, wait_for_copies=lambda: None).wait()
            (read,) = store.leases.acquire_read([weights], 0).wait()
            write = store.gradients.acquire(SlabName(group="unit", kind=pb.KIND_GRAD), 1).wait()
            streams = Streams(channel, store.session_id, lambda: None)
            yield _Remote(store=store, streams=streams, read_lease=read.lease_id, write_lease=write.lease_id)
    finally:
        store.close()


def _settle(daemon: StoreDaemon) -> None:
    """Wait until the daemon has made the arena's pages huge, for which it copies the whole arena in the background."""
    deadline = time.monotonic() + SETTLE_SECONDS
    with open_channel(daemon.address) as channel:
        admin = admin_grpc.StoreAdminStub(channel)
        detail = ""
        while time.monotonic() < deadline:
            before, detail = detail, admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10).tiers[0].detail
            if detail == before:
                return
            time.sleep(1.0)
