"""Thousands of small tensors in one job of a real daemon: they share packed groups, and each keeps its own values."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, admin_of, tiers
from tests.integration.support.store_client import Clients, refused
from trainer_client import ConfigError, JobConflictError, StoreClient, StoreClientSync, StoreNotFoundError, TensorSpec
from trainer_client.client.store_client.connection import Call, Connection
from trainer_client.client.store_client.job_layout import PACK_BYTES, JobLayout
from trainer_client.client.store_client.staging import registrations
from trainer_client.client.store_client.types import bytes_of
from trainer_client.client.transport.credentials import Credentials

CODE = grpc.StatusCode
COUNT = 3000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = pytest.mark.parametrize("store", [False, True], ids=["arena", "streams"], indirect=True)


def tensors_of(seed: int, count: int = COUNT) -> dict[str, torch.Tensor]:
    """Return small tensors of all types and several sizes, and two large tensors that are not packed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = random.Random(17)
    tensors = {
        f"layer.{i % 50}.{i}": torch.randn(shapes.choice([(3,), (), (2, 5), (70,)]), generator=generator).to(
            DTYPES[i % 3]
        )
        for i in range(count)
    }
    large = {
        "large": torch.randn(PACK_BYTES // 4, generator=generator),
        "cut": torch.randn(3 * PACK_BYTES, generator=generator),
    }
    return tensors | large


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for fqn, tensor in expected.items():
        assert found[fqn].dtype == tensor.dtype and torch.equal(found[fqn], tensor), fqn


@pytest.fixture
def store(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[StoreClientSync]:
    with StoreClientSync.connect(daemon.address, prefer_streams=request.param) as client:
        yield client


@WAYS
def test_tensors_put_in_any_batches_are_there_step_by_step(store: StoreClientSync) -> None:
    """The client writes full packs at once and parts of packs with the commit. A step that a reader holds never
    changes."""
    first, second = tensors_of(1), tensors_of(2)
    names = list(first)
    random.Random(3).shuffle(names)
    with store.open("small", first, shard_bytes=PACK_BYTES) as job:
        for start in range(0, len(names), 700):
            job.put({fqn: first[fqn] for fqn in names[start : start + 700]})
        assert job.commit() == 0
        with store.read("small") as held:
            assert_equal(held.get_many(first), first)
            changed = {fqn: second[fqn] for fqn in names[:40]}
            job.put(dict(list(changed.items())[:15]))
            job.put(dict(list(changed.items())[15:]))
            with pytest.raises(ConfigError, match="was put since the last commit"):
                job.put({names[0]: second[names[0]]})
            assert job.commit() == 1
            assert_equal(held.get_many(first), first)
        with store.read("small") as reader:
            assert_equal(reader.get_many(first), first | changed)
            for fqn in names[:5]:
                assert torch.equal(reader.get(fqn), changed[fqn])
            # Values that are put and then rolled back leave nothing behind, neither in the client nor in the store.
        job.put({names[50]: second[names[50]]})
        assert job.roll_back() == 1
        job.put({names[51]: second[names[51]]})
        job.commit()
        with store.read("small") as reader:
            assert_equal(reader.get_many(first), first | changed | {names[51]: second[names[51]]})
    listed = store.list_tensors("small")
    assert [tensor.fqn for tensor in listed] == sorted(first)
    assert all(tensor.shape == tuple(first[tensor.fqn].shape) for tensor in listed)
    assert all(tensor.held == ((0, first[tensor.fqn].numel()),) for tensor in listed)
    assert [t.fqn for t in store.list_tensors("small", prefix="layer.7.")] == sorted(
        fqn for fqn in first if fqn.startswith("layer.7.")
    )


async def test_the_asyncio_face_gets_many_at_once(daemon: Daemon) -> None:
    tensors = tensors_of(4, 200)
    async with await StoreClient.connect(daemon.address) as store, await store.open("small", tensors) as job:
        await job.put(tensors)
        await job.commit()
        async with await store.read("small") as reader:
            assert_equal(await reader.get_many(reversed(tensors)), dict(reversed(tensors.items())))
            assert await reader.get_many([]) == {}
            with pytest.raises(StoreNotFoundError, match="has no tensor 'nothing'"):
                await reader.get_many(["large", "nothing"])


def test_a_pack_of_which_a_part_is_missing_is_not_committed_first(daemon: Daemon) -> None:
    tensors = tensors_of(5, 100)
    with StoreClientSync.connect(daemon.address) as store, store.open("small", tensors) as job:
        missing = sorted(tensors)[10]
        job.put({fqn: tensor for fqn, tensor in tensors.items() if fqn != missing})
        with pytest.raises(JobConflictError, match=f"tensor '{missing}' of job 'small' has no initial values; put it"):
            job.commit()
        # The refused commit lost none of the values that were put.
        job.put({missing: tensors[missing]})
        assert job.commit() == 0
        with store.read("small") as reader:
            assert_equal(reader.get_many(tensors), tensors)


@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_they_survive_a_restart_and_go_on_with_their_names_in_another_order(tmp_path: Path, placement: Any) -> None:
    tensors = tensors_of(6, 500)
    with Daemon(tmp_path / "state", {"nvme_budget": "256MiB", "host_budget": "64MiB"}) as daemon:
        with (
            StoreClientSync.connect(daemon.address) as store,
            store.open("small", tensors, placement=placement) as job,
        ):
            job.put(tensors)
            job.commit()
        daemon.kill()
    with Daemon(tmp_path / "state", {"nvme_budget": "256MiB", "host_budget": "64MiB"}) as daemon:
        backwards = dict(reversed(tensors.items()))
        with StoreClientSync.connect(daemon.address) as store:
            with store.open("small", backwards, placement=placement) as job:
                assert job.step == 0
                job.put({"layer.3.3": tensors["layer.3.3"] + 1})
                job.commit()
                with store.read("small") as reader:
                    assert_equal(reader.get_many(tensors), tensors | {"layer.3.3": tensors["layer.3.3"] + 1})
            with (
                pytest.raises(JobConflictError, match="498 more are not in this model"),
                store.open("small", {"large": tensors["large"]}, placement=placement),
            ):
                pass
        with admin_of(daemon.address) as admin:
            admin.DeleteJob(admin_pb.DeleteJobRequest(job="small"), timeout=20)
            tiers = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=20).tiers
            assert [tier.used_bytes for tier in tiers if tier.tier == pb.TIER_NVME] == [0]


def put_as_earlier_versions(address: str, name: str, tensor: torch.Tensor) -> None:
    """Store a job of one tensor without packs and without a layout name, as earlier versions of the client did."""
    layout = JobLayout(
        name=name,
        tensors={"whole": TensorSpec.of(tensor)},
        durability="step",
        placement="nvme",
        shard_bytes=PACK_BYTES,
    )
    connection, call = Connection(address, "earlier", Credentials(), prefer_streams=False), Call(None, 30.0)
    session = connection.session(call)
    request = layout.open_request()
    request.layout = ""
    session.call("OpenJob", request, call)
    for registration in registrations(layout.groups()):
        session.call("RegisterShards", registration, call)
    for group, start, end in layout.shards("whole"):
        slab = pb.SlabName(group=group, kind=pb.KIND_PARAM)
        want = pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_WRITE)
        (lease,) = session.call("AcquireLeases", pb.AcquireLeasesRequest(wants=[want]), call).leases
        session.copy_in(call, lease, bytes_of(tensor.reshape(-1)[start:end]))
        releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id, publish=True)]
        session.call("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases), call)
    session.call("CommitStep", pb.CommitStepRequest(), call)
    connection.close()


def test_a_job_of_an_earlier_version_is_read_and_not_written(daemon: Daemon) -> None:
    tensors = {"whole": torch.randn(3 * PACK_BYTES)}
    put_as_earlier_versions(daemon.address, "earlier", tensors["whole"])
    with StoreClientSync.connect(daemon.address) as store:
        with pytest.raises(JobConflictError, match="put them into another job"):
            store.open("earlier", tensors, shard_bytes=PACK_BYTES)
        with store.read("earlier") as reader:
            assert_equal(reader.get_many(tensors), tensors)


def test_a_tensor_of_very_many_shards_is_read_whole_and_listed_in_pages(daemon: Daemon) -> None:
    """A tensor may have 1500 shards. A read of such a tensor once held up the daemon for minutes, because the daemon
    searched all shards for each shard."""
    whole = {"whole": torch.arange(16 * 1500, dtype=torch.float32)}
    with StoreClientSync.connect(daemon.address) as store:
        with store.open("shards", whole, shard_bytes=64) as job:
            job.put(whole)
            job.commit()
        with store.read("shards") as reader:
            assert torch.equal(reader.get("whole"), whole["whole"])
            assert torch.equal(reader.get("whole", offset=15, numel=9000), whole["whole"][15:9015])
            assert_equal(reader.get_many(["whole"]), whole)
    with admin_of(daemon.address) as admin:
        offsets, request = [], admin_pb.ListShardsRequest(job="shards", page_size=400)
        while True:
            page = admin.ListShards(request, timeout=20)
            offsets += [shard.offset for shard in page.shards]
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert offsets == [16 * i for i in range(1500)]
        (described,) = admin.ListJobs(admin_pb.ListJobsRequest(), timeout=20).jobs
        assert described.parameters == 16 * 1500
    program = str(Path(sys.executable).with_name("paramserver-admin"))
    command = [program, "shards", "shards", "--address", daemon.address]
    table = subprocess.run([*command, "--limit", "20"], capture_output=True, text=True, check=True).stdout
    assert "Only the first 20 are shown: --limit 0 shows all" in table and len(table.splitlines()) < 40
    table = subprocess.run([*command, "--limit", "0"], capture_output=True, text=True, check=True).stdout
    assert "Only the first" not in table and len(table.splitlines()) > 1500
    printed = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert [shard["offset"] for shard in printed["shards"]] == offsets and printed["next_page_token"] == ""


def test_ranges_that_cannot_share_a_lease_are_refused(daemon: Daemon, clients: Clients) -> None:
    tensors = tensors_of(8, 20)
    with StoreClientSync.connect(daemon.address) as store, store.open("small", tensors) as job:
        job.put(tensors)
        job.commit()
        client = clients.client()
        readers = [client.call("OpenReader", job="small").reader_id for _ in range(2)]

        def lease(*ranges: pb.TensorRange, **fields: Any) -> pb.Lease:
            want = pb.AcquireLeasesRequest.Want(mode=pb.LEASE_MODE_READ, ranges=ranges, **fields)
            (lease,) = client.call("AcquireLeases", wants=[want]).leases
            return lease

        def range_of(fqn: str, numel: int, reader: int = 0, offset: int = 0) -> pb.TensorRange:
            return pb.TensorRange(fqn=fqn, kind=pb.KIND_PARAM, offset=offset, numel=numel, reader_id=readers[reader])

        good = range_of("large", 5)
        assert lease(good, good, range_of("cut", 3, offset=7)).size_bytes == 32 + 32 + 12
        with refused(CODE.INVALID_ARGUMENT, "cannot share a lease"):
            lease(good, range_of("large", 5, reader=1))
        with refused(CODE.INVALID_ARGUMENT, "numel 0 is no range"):
            lease(good, range_of("large", 0))
        with refused(CODE.NOT_FOUND, "no element 32768 of 'large'"):
            lease(good, range_of("large", 1 << 40))
        with refused(CODE.NOT_FOUND, "reader 77 is not open"):
            lease(pb.TensorRange(fqn="large", kind=pb.KIND_PARAM, numel=1, reader_id=77))
        with refused(CODE.INVALID_ARGUMENT, "either one range or several"):
            lease(good, range=good)
        with refused(CODE.INVALID_ARGUMENT, "wants.ranges has 16385 entries"):
            lease(*[good] * 16_385)
        with refused(CODE.INVALID_ARGUMENT, "a range is leased for reading"):
            lease(good, slab=pb.SlabName(group="large[0:32768]", kind=pb.KIND_PARAM))
        client.close()


@pytest.mark.parametrize("ends", ["reader", "session"])
def test_thousands_of_leases_come_back_with_what_they_are_of(daemon: Daemon, clients: Clients, ends: str) -> None:
    """The daemon frees the leases in slices after the reader or the session has ended, and frees all of them."""
    tensors = {"w": torch.arange(1548, dtype=torch.float32)}
    with StoreClientSync.connect(daemon.address) as store:
        with store.open("leases", tensors) as job:
            job.put(tensors)
            job.commit()
        client = clients.client()
        reader = client.call("OpenReader", job="leases").reader_id
        used = leased_bytes(daemon)
        # The ranges differ, because leases on the same range would share its memory.
        ranges = [
            pb.TensorRange(fqn="w", kind=pb.KIND_PARAM, offset=offset, numel=48, reader_id=reader)
            for offset in range(1500)
        ]
        wants = [pb.AcquireLeasesRequest.Want(mode=pb.LEASE_MODE_READ, range=range_) for range_ in ranges]
        leases = client.call("AcquireLeases", wants=wants, seconds=60.0).leases
        assert len({lease.lease_id for lease in leases}) == 1500
        assert leased_bytes(daemon) == used + 1500 * 4096
        if ends == "reader":
            client.call("CloseReader", reader_id=reader)
        else:
            client.close()
        deadline = time.monotonic() + 20
        while leased_bytes(daemon) != used:
            assert time.monotonic() < deadline, "leases were not released"
            time.sleep(0.02)
        if ends == "reader":
            with refused(CODE.NOT_FOUND, "is not held by this session"):
                client.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release(lease_id=leases[0].lease_id)])
            client.close()


def leased_bytes(daemon: Daemon) -> int:
    (host,) = (tier for tier in tiers(daemon.address) if tier.tier == pb.TIER_HOST)
    return host.leased_bytes
