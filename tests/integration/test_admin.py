"""The operators' view of a daemon: admin calls, the command line's tables and JSON, health and reflection."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import DType, Kind, TierName
from tests.integration.support.admin import admin, admin_json
from tests.integration.support.daemon import MIB, SERVICE, Daemon, admin_of, tiers
from tests.integration.support.store_client import Clients, Rank, refused
from tests.unit.storage.builders import Layout
from trainer_client import StoreClientSync

CODE = grpc.StatusCode


@pytest.fixture
def rank(clients: Clients, job: str) -> Rank:
    """One rank of a job that is at step 2. Its weights are on NVMe, its moments in host memory."""
    layout = Layout(name=job, precision=DType.BFLOAT16, moments=TierName.HOST)
    begun = clients.rank(layout).begin()
    begun.train(1, 2)
    return begun


def test_tiers_add_up(daemon: Daemon, rank: Rank) -> None:
    host, nvme = tiers(daemon.address)
    assert (host.tier, nvme.tier) == (pb.TIER_HOST, pb.TIER_NVME)
    assert (host.budget_bytes, nvme.budget_bytes) == (16 * MIB, 256 * MIB)
    (described,) = rank.admin.ListJobs(admin_pb.ListJobsRequest()).jobs
    bytes_of_job = {entry.tier: entry.bytes for entry in described.bytes}
    assert nvme.used_bytes == bytes_of_job[pb.TIER_NVME]
    assert 0 < bytes_of_job[pb.TIER_HOST] < host.used_bytes <= host.budget_bytes
    assert host.detail.split(", ")[0] == "shared memory"
    assert nvme.detail.startswith(f"{daemon.state_dir}/data.0 (")
    lease = rank.acquire(rank.groups[0], Kind.EXP_AVG, pb.LEASE_MODE_READ)
    leased = tiers(daemon.address)[0].leased_bytes
    assert leased == -(-lease.size_bytes // 4096) * 4096
    rank.release(lease)
    before = nvme.bytes_written
    rank.train(3, 3)
    written = tiers(daemon.address)[1].bytes_written - before
    # A step writes bf16 weights, fp32 master weights and two fp32 moments for each element, rounded up to whole pages.
    elements = sum(rank.layout.group(group).numel for group in rank.groups)
    assert elements * 14 <= written <= elements * 14 + 8 * 4096


def test_accounts_name_the_holder_of_every_byte_and_a_lease_is_one(daemon: Daemon, rank: Rank) -> None:
    lease = rank.acquire(rank.groups[0], Kind.EXP_AVG, pb.LEASE_MODE_READ)
    host, nvme = admin_json(daemon.address, "accounts")["accounts"]
    assert host["settled"] and nvme["settled"]
    for account in (host, nvme):
        assert account["unexplained_bytes"] == 0
        assert sum(holding["bytes"] for holding in account["holdings"]) == account["used_bytes"]
    held = {holding["holder"]: holding["bytes"] for holding in host["holdings"]}
    assert held.keys() == {"fixed", "jobs", "leases"}
    assert held["leases"] == -(-lease.size_bytes // 4096) * 4096
    assert "leases" in admin(daemon.address, "accounts")
    rank.release(lease)


def test_jobs_and_shards_are_described(rank: Rank, job: str) -> None:
    (described,) = rank.admin.ListJobs(admin_pb.ListJobsRequest()).jobs
    assert (described.name, described.world_size, described.sessions) == (job, 1, 1)
    assert (described.committed_step, described.durable_step) == (2, 2)
    assert described.parameters == sum(rank.layout.numels) * len(rank.groups)
    assert described.durability.WhichOneof("class") == "step"
    shards = rank.admin.ListShards(admin_pb.ListShardsRequest(job=job)).shards
    keys = [(s.fqn, s.kind, s.offset) for s in shards]
    assert keys == sorted(keys) and len(keys) == len(rank.groups) * len(rank.layout.numels) * 4
    moments = [s for s in shards if s.kind == pb.KIND_EXP_AVG]
    assert all(s.placement == pb.TIER_HOST and pb.TIER_HOST in s.tiers and pb.TIER_NVME in s.tiers for s in moments)
    assert {(s.dtype, s.version) for s in shards if s.kind == pb.KIND_PARAM} == {(pb.DTYPE_BFLOAT16, 2)}


def test_shards_come_in_pages_and_by_prefix_and_kind(rank: Rank, job: str) -> None:
    everything = rank.admin.ListShards(admin_pb.ListShardsRequest(job=job)).shards
    paged: list[admin_pb.ShardInfo] = []
    token = ""
    for _ in range(20):
        page = rank.admin.ListShards(admin_pb.ListShardsRequest(job=job, page_size=5, page_token=token))
        paged.extend(page.shards)
        token = page.next_page_token
        if not token:
            break
    assert paged == list(everything)
    request = admin_pb.ListShardsRequest(job=job, fqn_prefix="block.1.weight.0", kind=pb.KIND_MASTER)
    (found,) = rank.admin.ListShards(request).shards
    assert (found.fqn, found.numel, found.group) == ("block.1.weight.0", 30_003, "block.1")


def test_a_watch_gives_readings_until_it_is_cancelled(daemon: Daemon, rank: Rank) -> None:
    began = time.monotonic()
    watch = rank.admin.WatchTiers(admin_pb.WatchTiersRequest(interval_seconds=0.1), timeout=20)
    readings = [next(watch) for _ in range(3)]
    # The daemon's event loop counts in milliseconds, so each of its two waits may end one too early.
    assert time.monotonic() - began > 0.198
    watch.cancel()
    times = [reading.unix_seconds for reading in readings]
    assert times[0] < times[1] < times[2] and {reading.epoch for reading in readings} == {rank.welcome.epoch}
    assert all(reading.sessions >= 1 for reading in readings)
    with refused(CODE.INVALID_ARGUMENT, "interval_seconds 0.01 must be at least 0.1"):
        next(rank.admin.WatchTiers(admin_pb.WatchTiersRequest(interval_seconds=0.01), timeout=20))


def test_an_error_that_lists_the_jobs_leaves_out_most_of_many(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as crowded, Clients(crowded.address) as clients:
        for number in range(23):
            clients.rank(
                Layout(name=f"run-{number:02d}", numels=(16,), groups=("a",)), run_id=str(number)
            ).begin().close()
        with admin_of(crowded.address) as stub, refused(CODE.NOT_FOUND, "run-18, run-19 and 3 more"):
            stub.ListShards(admin_pb.ListShardsRequest(job="nobody"))
        assert crowded.stop() == 0


def test_a_job_in_use_is_not_deleted_and_one_that_is_not_leaves_nothing(daemon: Daemon, rank: Rank, job: str) -> None:
    with admin_of(daemon.address) as stub:
        with refused(CODE.FAILED_PRECONDITION, f"job '{job}' has 1 sessions attached; stop its trainers first"):
            stub.DeleteJob(admin_pb.DeleteJobRequest(job=job))
        with refused(CODE.NOT_FOUND, "there is no job 'nobody'", f"known jobs: {job}"):
            stub.DeleteJob(admin_pb.DeleteJobRequest(job="nobody"))
        rank.assert_at(2)
        rank.close()
        assert f"deleted job {job}" in admin(daemon.address, "delete-job", job, "--yes")
        assert tiers(daemon.address)[1].used_bytes == 0
        with refused(CODE.NOT_FOUND):
            stub.ListShards(admin_pb.ListShardsRequest(job=job))


def test_steps_are_kept_listed_read_and_forgotten(daemon: Daemon, rank: Rank, job: str) -> None:
    assert f"kept step 2 of job {job} as two" in admin(
        daemon.address, "keep", job, "two", "--note", "before the change"
    )
    rank.train(3, 4)
    used = tiers(daemon.address)[1].used_bytes
    described = admin_json(daemon.address, "keep", job, "four", "--step", "4")["kept"]
    assert (described["name"], described["step"], described["world_size"]) == ("four", 4, 1)
    assert tiers(daemon.address)[1].used_bytes == used
    listed = admin_json(daemon.address, "kept", job)
    assert listed["state_dir"] == str(daemon.state_dir)
    assert [(kept["name"], kept["step"], kept["note"]) for kept in listed["kept"]] == [
        ("two", 2, "before the change"),
        ("four", 4, ""),
    ]
    two, four = listed["kept"]
    assert two["bytes"] == two["alone_bytes"] == four["bytes"] and four["alone_bytes"] == 0
    account = admin_json(daemon.address, "accounts")["accounts"][1]
    held = {holding["holder"]: holding["bytes"] for holding in account["holdings"]}
    assert held["kept steps"] == two["bytes"] and account["unexplained_bytes"] == 0
    assert admin_json(daemon.address, "jobs")["jobs"][0]["kept_steps"] == 2
    (row,) = [line for line in admin(daemon.address, "kept", job).splitlines() if "before the change" in line]
    assert " two " in row

    with StoreClientSync.connect(daemon.address) as client, client.read_kept(job, "two") as reader:
        fqns = [tensor.fqn for tensor in reader.tensors()]
        assert reader.step == 2 and len(fqns) == len(rank.groups) * len(rank.layout.numels)
        expected = rank.reference.states(2)
        for (_, fqn, kind), value in expected.items():
            if kind is Kind.MASTER:
                assert torch.equal(reader.get(fqn, kind="master"), value)
        # The reader holds the step, also when it is forgotten.
        assert f"forgot the kept step two of job {job}" in admin(daemon.address, "forget", job, "two", "--yes")
        reader.get(fqns[0])
    assert tiers(daemon.address)[1].used_bytes == used - two["bytes"]


def test_a_step_is_kept_and_read_by_good_names_only(daemon: Daemon, rank: Rank, job: str) -> None:
    with admin_of(daemon.address) as stub:
        stub.KeepStep(admin_pb.KeepStepRequest(job=job, name="two"))
        assert stub.KeepStep(admin_pb.KeepStepRequest(job=job, step=2, name="two")).kept.step == 2
        rank.train(3, 3)
        with refused(CODE.ALREADY_EXISTS, f"job '{job}' keeps step 2 under the name 'two'"):
            stub.KeepStep(admin_pb.KeepStepRequest(job=job, name="two"))
        for name, note in (("", ""), ("a\nb", ""), ("x" * 2000, ""), ("a", "a\nb")):
            with refused(CODE.INVALID_ARGUMENT, "1 to 1024 bytes of printable text"):
                stub.KeepStep(admin_pb.KeepStepRequest(job=job, name=name, note=note))
        with refused(CODE.NOT_FOUND, "does not hold step 9"):
            stub.KeepStep(admin_pb.KeepStepRequest(job=job, name="nine", step=9))
        calls: list[Callable[[], Any]] = [
            lambda: stub.KeepStep(admin_pb.KeepStepRequest(job="nobody", name="two")),
            lambda: stub.ForgetStep(admin_pb.ForgetStepRequest(job="nobody", name="two")),
        ]
        for call in calls:
            with refused(CODE.NOT_FOUND, f"there is no job 'nobody'; known jobs: {job}"):
                call()
        with refused(CODE.NOT_FOUND, f"job '{job}' keeps no step under the name 'one'"):
            stub.ForgetStep(admin_pb.ForgetStepRequest(job=job, name="one"))
        assert not stub.ListKeptSteps(admin_pb.ListKeptStepsRequest(job="nobody")).kept
    with refused(CODE.INVALID_ARGUMENT, "name neither beside it"):
        rank.call("OpenReader", job=job, kept="two", step=2)
    with refused(CODE.NOT_FOUND, "keeps no step under the name 'one'"):
        rank.call("OpenReader", job=job, kept="one")


def test_tables_show_every_figure(daemon: Daemon, rank: Rank, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = admin(daemon.address, "tiers")
    assert f"Tiers of {daemon.state_dir} (1 sessions)" in table
    assert all(word in table for word in ("host", "nvme", "16.0 MiB", "256.0 MiB", "shared memory", "data.0"))
    table = admin(daemon.address, "jobs")
    (row,) = [line for line in table.splitlines() if job in line]
    assert " step " in row and f"{sum(rank.layout.numels) * 2:,}" in row
    table = admin(daemon.address, "shards", job, "--prefix", "block.0.weight.1", "--kind", "exp_avg_sq")
    (row,) = [line for line in table.splitlines() if "block.0.weight.1" in line]
    assert all(word in row for word in ("exp_avg_sq", " 17 ", "float32", " 2 ", "host nvme", "block.0"))
    monkeypatch.setenv("PARAMSERVER_ADDRESS", daemon.address)
    assert CliRunner().invoke(app, ["jobs"]).exit_code == 0


def test_json_is_one_line_with_the_names_of_the_contract_and_numbers(daemon: Daemon, rank: Rank, job: str) -> None:
    reading = admin_json(daemon.address, "tiers")
    host, nvme = reading["tiers"]
    assert (host["tier"], host["budget_bytes"], nvme["budget_bytes"]) == ("TIER_HOST", 16 * MIB, 256 * MIB)
    assert reading["sessions"] == 1 and reading["state_dir"] == str(daemon.state_dir)
    (described,) = admin_json(daemon.address, "jobs")["jobs"]
    assert (described["name"], described["committed_step"], described["sessions"]) == (job, 2, 1)
    shards = admin_json(daemon.address, "shards", job, "--kind", "param")["shards"]
    assert [s["numel"] for s in shards] == list(rank.layout.numels) * 2
    assert {s["version"] for s in shards} == {2}


def test_the_command_line_says_what_is_wrong_in_one_line(daemon: Daemon, job: str, tmp_path: Any) -> None:
    (line,) = admin(daemon.address, "shards", "nobody", code=1).splitlines()
    assert line.startswith("paramserver-admin: NOT_FOUND: there is no job 'nobody'")
    nowhere = CliRunner().invoke(app, ["tiers", "--address", f"unix:{tmp_path}/none.sock"])
    assert nowhere.exit_code == 1 and "no daemon answers at unix:" in nowhere.output
    nothing = CliRunner().invoke(app, ["tiers"], env={"PARAMSERVER_ADDRESS": ""})
    assert nothing.exit_code == 2 and "--address or $PARAMSERVER_ADDRESS" in nothing.output


def test_health_and_reflection_name_the_services(daemon: Daemon) -> None:
    with channel_to(daemon.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE, "paramserver.v1.StoreAdmin"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        services, file = reflection.ServerReflectionInfo(iter(asked), timeout=10)
        names = {service.name for service in services.list_services_response.service}
        assert {SERVICE, "paramserver.v1.StoreAdmin", "grpc.health.v1.Health"} <= names
        assert file.file_descriptor_response.file_descriptor_proto
