"""A job changes to another layout, call by call. At any instant the daemon has either the former layout or the new one,
as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import DType, Kind
from tests.integration.support.daemon import Daemon, admin_of, tiers
from tests.integration.support.store_client import Clients, Rank, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout, reference_of
from trainer_client import StoreClientSync

CODE = grpc.StatusCode
LAYOUT = Layout(precision=DType.BFLOAT16, numels=(5_000, 17))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "state") as daemon:
        yield daemon


def two_ranks(clients: Clients, first_step: int, run_id: str = "two") -> list[Rank]:
    """Open a run of two ranks in a new layout, where each rank has one of the two groups of the former run's only
    rank."""
    ranks = [clients.rank(LAYOUT, rank=rank, ranks=2, run_id=run_id) for rank in (0, 1)]
    for rank in ranks:
        rank.open(layout=f"of {run_id}")
    for rank in ranks:
        rank.call("BeginLayout", first_step=first_step)
        rank.register()
    return ranks


def stage(rank: Rank, kind: Kind, step: int, trained: int) -> None:
    """Publish the states that torch has after `trained` steps as the rank's states in the layout's first step
    `step`."""
    states = reference_of(LAYOUT).states(trained)
    for group in rank.groups:
        lease = rank.acquire(group, kind, pb.LEASE_MODE_WRITE, step=step)
        tensor = rank.tensor(lease, kind).zero_()
        for shard in LAYOUT.group(group).shards:
            tensor[shard.group_offset :][: shard.numel] = states[group, shard.fqn, kind]
        rank.release(lease, publish=True)


def commit(ranks: list[Rank], step: int) -> None:
    with ThreadPoolExecutor(len(ranks)) as threads:
        assert list(threads.map(lambda rank: rank.commit(step), ranks)) == [True] * len(ranks)


def job_info(daemon: Daemon) -> admin_pb.JobInfo:
    with admin_of(daemon.address) as admin:
        (info,) = admin.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs
    return info


def test_a_daemon_killed_in_the_middle_has_the_former_layout_and_after_the_commit_the_new_one(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        clients.rank(LAYOUT).begin().train(1, 3)
        used = tiers(daemon.address)[1].used_bytes
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        first, second = two_ranks(clients, 4)
        for kind in LAYOUT.kinds:
            stage(first, kind, 4, trained=3)
        stage(second, Kind.PARAM, 4, trained=3)
        info = job_info(daemon)
        assert (info.world_size, info.sessions, info.committed_step) == (1, 2, 3)
        assert tiers(daemon.address)[1].used_bytes > used
        daemon.kill()
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        assert tiers(daemon.address)[1].used_bytes == used, "nothing of the layout that was not committed is kept"
        rank = clients.rank(LAYOUT, run_id="as before")
        assert rank.resume() == 3
        rank.assert_at(3)
        rank.train(4, 4)
        rank.close()
        wait_until(lambda: not job_info(daemon).sessions)
        ranks = two_ranks(clients, 5)
        for rank in ranks:
            for kind in LAYOUT.kinds:
                stage(rank, kind, 5, trained=4)
        commit(ranks, 5)
        daemon.kill()
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        assert (job_info(daemon).world_size, job_info(daemon).committed_step) == (2, 5)
        assert tiers(daemon.address)[1].used_bytes == used
        for number in (0, 1):
            rank = clients.rank(LAYOUT, rank=number, ranks=2, run_id="third")
            assert rank.resume() == 5
            rank.assert_at(4)


def test_a_run_that_fits_no_layout_trains_nothing(daemon: Daemon) -> None:
    with Clients(daemon.address) as clients:
        clients.rank(LAYOUT).begin().train(1, 1)
    wait_until(lambda: not job_info(daemon).sessions)
    with Clients(daemon.address) as clients:
        ranks = [clients.rank(LAYOUT, rank=rank, ranks=2, run_id="two") for rank in (0, 1)]
        for rank in ranks:
            rank.open(layout="another")
        with refused(CODE.FAILED_PRECONDITION, "stored by 1 ranks and this run has 2", "BeginLayout"):
            ranks[0].register()
        with refused(CODE.FAILED_PRECONDITION, "stored by 1 ranks and this run has 2"):
            ranks[0].commit(2)
        with refused(CODE.INVALID_ARGUMENT, "begin it with a later step than 0"):
            ranks[0].call("BeginLayout", first_step=0)
        ranks[0].call("BeginLayout", first_step=2)
        with refused(CODE.INVALID_ARGUMENT, "first_step 3 differs from that of the other ranks of this run, 2"):
            ranks[1].call("BeginLayout", first_step=3)
        ranks[1].call("BeginLayout", first_step=2)
        with refused(CODE.FAILED_PRECONDITION, "step 3 cannot be prepared, the next one is 2"):
            ranks[1].commit(3)
    wait_until(lambda: not job_info(daemon).sessions)
    with Clients(daemon.address) as clients:
        rank = clients.rank(LAYOUT, run_id="as before")
        assert rank.resume() == 1
        rank.train(2, 3)
        rank.assert_at(3)


def test_readers_and_watchers_go_on_over_a_change_of_layout(daemon: Daemon) -> None:
    with Clients(daemon.address) as clients, StoreClientSync.connect(daemon.address) as client:
        rank = clients.rank(LAYOUT).begin()
        rank.train(1, 2)
        rank.close()
        watch = client.watch("job")
        assert next(watch).step == 2
        wait_until(lambda: not job_info(daemon).sessions)
        with client.read("job") as reader:
            ranks = two_ranks(clients, 3)
            for rank in ranks:
                for kind in LAYOUT.kinds:
                    stage(rank, kind, 3, trained=2)
            commit(ranks, 3)
            assert next(watch).step == 3
            expected = reference_of(LAYOUT).states(2)
            assert reader.client_state(0) == b"0:2"
            with client.read("job") as after:
                assert after.client_state(1) == b"1:3"
                for held in (reader, after):
                    for tensor in held.tensors():
                        group = tensor.fqn.partition(".weight")[0]
                        for name in tensor.kinds:
                            values = expected[group, tensor.fqn, Kind(name)]
                            assert torch.equal(held.get(tensor.fqn, kind=name), values)
        (job,) = client.list_jobs()
        assert [(layout.name, layout.world_size, layout.steps) for layout in job.layouts] == [("of two", 2, (3,))]
        for rank in ranks:
            rank.close()
