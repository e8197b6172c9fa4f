"""Sessions, leases and runs over the wire: which calls a session may make when, and what a session that dies leaves
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import DType, Kind, TierName
from tests.integration.conftest import HEARTBEAT_TIMEOUT_SECONDS
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Clients, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
READ, WRITE = pb.LEASE_MODE_READ, pb.LEASE_MODE_WRITE


@pytest.mark.parametrize("precision", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("tier", [TierName.NVME, TierName.HOST])
def test_a_run_and_its_resumption_have_the_bits_of_torch(
    clients: Clients, job: str, precision: DType, tier: TierName
) -> None:
    layout = Layout(name=job, precision=precision, weights=tier, moments=tier)
    first = clients.rank(layout, run_id="first").begin()
    first.train(1, 3)
    first.assert_at(3)
    first.hand_over(4)
    first.close()
    second = clients.rank(layout, run_id="second")
    assert second.resume() == 3
    second.call("RollBack", step=3)
    second.assert_at(3)
    second.train(4, 5)
    second.assert_at(5)
    versions = second.call("ListVersions").versions
    assert [(v.step, v.durable) for v in versions] == [(5, True)]
    assert abs(versions[0].committed_at_unix_seconds - time.time()) < 60


def test_parameters_can_be_read_before_their_step_is_committed(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    for step in (1, 2):
        rank.hand_over(step)
        lease = rank.acquire(rank.groups[0], Kind.PARAM, READ)
        assert lease.version == step, "the update is waited for"
        rank.release(lease)
        rank.commit(step)
    rank.assert_at(2)


def test_a_prefetched_window_is_used(clients: Clients, daemon: Daemon, job: str) -> None:
    layout = Layout(name=job)
    clients.rank(layout, run_id="first").begin().close()
    rank = clients.rank(layout, run_id="second")
    rank.resume()
    wants = [
        pb.PrefetchRequest.Want(slab=pb.SlabName(group=group, kind=pb.KIND_PARAM), position=position)
        for position, group in enumerate(rank.groups)
    ]
    rank.call("Prefetch", wants=wants)
    wait_until(lambda: tiers(daemon.address)[0].queue_depth == 0)
    before = tiers(daemon.address)[0]
    for group in rank.groups:
        rank.release(rank.acquire(group, Kind.PARAM, READ))
    after = tiers(daemon.address)[0]
    assert (after.hits - before.hits, after.misses - before.misses) == (len(rank.groups), 0)


def test_a_step_is_committed_when_every_rank_has_voted(clients: Clients, job: str) -> None:
    layout = Layout(name=job)
    ranks = [clients.rank(layout, rank=rank, ranks=2) for rank in range(2)]
    both(ranks, lambda rank: rank.begin())
    for rank in ranks:
        rank.hand_over(1)
    votes = [threading.Thread(target=rank.commit, args=[1]) for rank in ranks]
    votes[0].start()
    votes[0].join(0.3)
    assert votes[0].is_alive(), "it waits for the other rank"
    votes[1].start()
    for vote in votes:
        vote.join()
    for rank in ranks:
        rank.assert_at(1)
    # In the next run each rank finds the commit to which it contributed.
    for rank in ranks:
        rank.close()
    again = [clients.rank(layout, rank=rank, ranks=2, run_id="again") for rank in range(2)]
    assert both(again, lambda rank: rank.resume()) == [1, 1]


def test_a_rank_that_goes_breaks_the_step_for_all_and_the_job_goes_on_in_a_new_run(clients: Clients, job: str) -> None:
    layout = Layout(name=job)
    ranks = [clients.rank(layout, rank=rank, ranks=2, name=f"rank-{rank}") for rank in range(2)]
    both(ranks, lambda rank: rank.begin())
    for rank in ranks:
        rank.hand_over(1)
    gone = threading.Timer(0.2, ranks[1].close)
    gone.start()
    with refused(CODE.ABORTED, "rank 1 (rank-1) of this run is gone", "restart the run"):
        ranks[0].commit(1)
    gone.join()
    with refused(CODE.ABORTED, "is gone"):
        ranks[0].acquire(ranks[0].groups[0], Kind.PARAM, READ)
    with refused(CODE.FAILED_PRECONDITION, f"job '{job}' is in use by another run (rank-0)", "use another job name"):
        clients.rank(layout, rank=1, ranks=2, run_id="again").open()
    ranks[0].close()
    again = [clients.rank(layout, rank=rank, ranks=2, run_id="again") for rank in range(2)]
    assert both(again, lambda rank: rank.resume()) == [0, 0]
    both(again, lambda rank: rank.train(1, 1))
    for rank in again:
        rank.assert_at(1)


def test_a_silent_client_is_void_and_its_leases_are_free(clients: Clients, daemon: Daemon, job: str) -> None:
    layout = Layout(name=job)
    clients.rank(layout, run_id="first").begin().close()
    silent = clients.client(silent=True, name="silent")
    rank = clients.rank(layout, run_id="second")
    # The rank makes its calls with the silent session's id.
    own, rank.session_id = rank.session_id, silent.session_id
    rank.resume()
    lease = rank.acquire(rank.groups[0], Kind.GRAD, WRITE, step=1)
    assert tiers(daemon.address)[0].leased_bytes > 0
    assert silent.ended.wait(30)
    wait_until(lambda: f"session of silent ended (no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:g} s" in daemon.log)
    wait_until(lambda: tiers(daemon.address)[0].leased_bytes == 0)
    with refused(CODE.NOT_FOUND, "session is unknown or has ended; open a new one"):
        rank.apply(1, lease, group=rank.groups[0])
    rank.session_id, rank.run_id = own, "third"
    assert rank.resume() == 0


def kill_a_rank_with_leases(daemon: Daemon, job: str) -> None:
    """Start a rank in a process of its own, kill it once it has leases, and return when the process has ended."""
    program = (
        "import time; from tests.integration.support.store_client import Rank;"
        "from tests.unit.storage.builders import Layout;"
        "from tests.integration.test_sessions import Kind, READ, WRITE;"
        f"rank = Rank({daemon.address!r}, Layout(name={job!r})).begin();"
        "rank.acquire(rank.groups[0], Kind.GRAD, WRITE, step=1); rank.acquire(rank.groups[1], Kind.PARAM, READ);"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "ready\n"
        assert tiers(daemon.address)[0].leased_bytes > 0
        os.kill(process.pid, signal.SIGKILL)


def test_a_run_that_is_started_right_after_a_crash_is_not_refused(clients: Clients, daemon: Daemon, job: str) -> None:
    """The session of the killed rank holds the job for its grace time, so the next run's call waits for its end."""
    kill_a_rank_with_leases(daemon, job)
    rank = clients.rank(Layout(name=job), run_id="second")
    assert rank.resume() == 0
    rank.train(1, 1)
    rank.assert_at(1)


def test_the_leases_of_a_killed_process_are_free_at_once(tmp_path: Path) -> None:
    """They are void because the connection ended, well before a heartbeat could be missed."""
    config = {"heartbeat_timeout_seconds": 600.0, "session_grace_seconds": 0.5}
    with Daemon(tmp_path / "state", config) as daemon, Clients(daemon.address) as clients:
        kill_a_rank_with_leases(daemon, "job")
        wait_until(lambda: tiers(daemon.address)[0].leased_bytes == 0)
        rank = clients.rank(Layout(name="job"), run_id="second")
        assert rank.resume() == 0
        rank.train(1, 1)
        rank.assert_at(1)


def test_a_rank_is_attached_once_and_all_describe_the_same_job(clients: Clients, job: str) -> None:
    layout = Layout(name=job)
    first = clients.rank(layout, rank=0, ranks=2)
    first.open()
    with refused(CODE.FAILED_PRECONDITION, "has opened a job already"):
        first.open()
    with refused(CODE.FAILED_PRECONDITION, "rank 0 of this run", "is attached already"):
        clients.rank(layout, rank=0, ranks=2).open()
    with refused(CODE.INVALID_ARGUMENT, "rank 1 describes job"):
        clients.rank(replace(layout, numels=(16,)), rank=1, ranks=2).open()
    clients.rank(layout, rank=1, ranks=2).open()


def test_another_layout_is_refused_by_the_name_of_the_parameter_on_every_rank(clients: Clients, job: str) -> None:
    layout = Layout(name=job)
    one = clients.rank(layout, run_id="one").begin()
    one.close()
    other = replace(layout, numels=(30_003, 17, 12_001))
    for attempt in range(2):
        # The second rank of the launch comes after the first one was refused. The daemon refuses it with the same
        # reason.
        rank = clients.rank(other, run_id="two", name=f"attempt {attempt}")
        with refused(
            CODE.FAILED_PRECONDITION, "'block.0.weight.2' has shape [12000] in the store and [12001] in this model"
        ):
            rank.open()
    again = clients.rank(layout, run_id="three")
    assert again.resume() == 0
    again.assert_at(0)


def test_resume_policies(clients: Clients, job: str) -> None:
    layout = Layout(name=job)
    with refused(CODE.NOT_FOUND, "resume is 'must'"):
        clients.rank(layout, run_id="1").open(pb.RESUME_POLICY_MUST)
    clients.rank(layout, run_id="2").begin().close()
    with refused(CODE.ALREADY_EXISTS, "has committed step 0 and resume is 'never'"):
        clients.rank(layout, run_id="3").open(pb.RESUME_POLICY_NEVER)
    assert [c.step for c in clients.rank(layout, run_id="4").open(pb.RESUME_POLICY_AUTO)] == [0]


def test_a_caller_that_waits_for_room_gives_up_at_its_deadline_and_leaves_nothing(
    clients: Clients, daemon: Daemon, job: str
) -> None:
    # The host tier has 16 MiB, and each slab 3 MiB. The gradients of all groups fit at once, but not six more slabs.
    layout = Layout(name=job, numels=(786_432,), groups=("a", "b"), with_skips=False)
    rank = clients.rank(layout).begin()
    held = [rank.acquire(group, Kind.GRAD, WRITE, step=1) for group in "ab"]
    other = clients.client()
    wants = [
        pb.AcquireLeasesRequest.Want(slab=pb.SlabName(group=group, kind=kind), mode=READ)
        for group in "ab"
        for kind in (pb.KIND_PARAM, pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ)
    ]
    before = tiers(daemon.address)[0].leased_bytes
    with refused(CODE.DEADLINE_EXCEEDED):
        rank.call("AcquireLeases", wants=wants, seconds=0.5)
    wait_until(lambda: tiers(daemon.address)[0].leased_bytes == before)
    assert tiers(daemon.address)[0].queue_depth == 0
    for group, lease in zip("ab", held, strict=True):
        rank.release(lease)
        rank.release(rank.acquire(group, Kind.PARAM, READ))
    other.close()
    rank.train(1, 1)
    rank.assert_at(1)


def test_leases_are_for_what_they_say(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    group = rank.groups[0]
    with refused(CODE.INVALID_ARGUMENT, "lease mode 1 is not possible for kind grad"):
        rank.acquire(group, Kind.GRAD, READ)
    put = rank.acquire(group, Kind.PARAM, WRITE, step=1)
    with refused(CODE.FAILED_PRECONDITION, "is being written by another lease of this session"):
        rank.acquire(group, Kind.PARAM, WRITE, step=1)
    with refused(CODE.FAILED_PRECONDITION, "is not for the gradient of group"):
        rank.apply(1, put, group=group)
    rank.release(put)
    with refused(CODE.FAILED_PRECONDITION, "step 0 cannot be prepared, the next one is 1"):
        rank.acquire(group, Kind.PARAM, WRITE)
    reading = rank.acquire(group, Kind.PARAM, READ)
    with refused(CODE.INVALID_ARGUMENT, f"lease {reading.lease_id} (read) cannot be published"):
        rank.release(reading, publish=True)
    with refused(CODE.FAILED_PRECONDITION, "is not for the gradient of group"):
        rank.apply(1, reading, group=group)
    gradient = rank.acquire(group, Kind.GRAD, WRITE, step=1)
    with refused(CODE.FAILED_PRECONDITION, "is leased by this session already"):
        rank.acquire(group, Kind.GRAD, WRITE, step=1)
    with refused(CODE.FAILED_PRECONDITION, "is not for the gradient of group"):
        rank.apply(1, gradient, group=rank.groups[1])
    rank.release(reading)
    with refused(CODE.NOT_FOUND, f"lease {reading.lease_id} is not held by this session"):
        rank.release(reading)
    rank.apply(1, gradient, group=group)
    with refused(CODE.NOT_FOUND, "it was returned, consumed or never granted"):
        rank.release(gradient)
    with refused(CODE.NOT_FOUND, "is not held by this session"):
        other = clients.client()
        other.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release(lease_id=gradient.lease_id)])


def both(ranks: Any, action: Any) -> list[Any]:
    """Run `action` for all ranks at the same time, and return its results."""
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i, r=r: results.update({i: action(r)})) for i, r in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(ranks))]


def test_a_vote_for_a_wrong_step_is_refused_and_the_right_one_goes_on(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    rank.hand_over(1)
    for wrong, why in ((0, "the next one is 1"), (2, "step 1 is under way")):
        with refused(CODE.FAILED_PRECONDITION, why):
            rank.commit(wrong)
    rank.commit(1)
    rank.assert_at(1)


def test_values_that_are_being_staged_cannot_be_read(clients: Clients, job: str) -> None:
    layout = Layout(name=job, weights=TierName.HOST)
    rank = clients.rank(layout)
    rank.open()
    rank.register()
    rank.acquire(rank.groups[0], Kind.PARAM, WRITE)
    with refused(CODE.FAILED_PRECONDITION, "commit the initial values as step 0 first"):
        rank.acquire(rank.groups[0], Kind.PARAM, READ)


def test_a_final_update_uses_its_gradient_up_and_can_be_withdrawn_all_the_same(
    clients: Clients, daemon: Daemon, job: str
) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    group = rank.groups[0]
    lease = rank.acquire(group, Kind.GRAD, WRITE, step=1)
    rank.apply(1, lease, group=group, provisional=True, final=True)
    rank.call("ParkGradients", lease_ids=[lease.lease_id])
    wait_until(lambda: tiers(daemon.address)[0].gradient_bytes == 0)
    rank.call("WithdrawUpdates", step=1, groups=[group])
    with refused(CODE.FAILED_PRECONDITION, "a final update has used it"):
        rank.apply(1, lease, group=group)
    with refused(CODE.NOT_FOUND, "an update was its last use"):
        rank.acquire(group, Kind.GRAD, WRITE, step=1)
    rank.release(lease)
    rank.train(1, 1)
    rank.assert_at(1)


@pytest.mark.parametrize("registers_arena", [True, False])
def test_early_updates_in_memory_begin_before_the_vote_where_a_device_computes(
    clients: Clients, daemon: Daemon, job: str, registers_arena: bool
) -> None:
    """They take the room of a second version until the commit; other clients need the processor meanwhile."""
    layout = Layout(name=job, weights=TierName.HOST, moments=TierName.HOST, every_steps=0)
    rank = clients.rank(layout, registers_arena=registers_arena).begin()
    rank.train(1, 1)
    at_rest = tiers(daemon.address)[0].used_bytes
    rank.hand_over(2, provisional=True)
    states = sum(layout.group(group).numel for group in layout.groups) * 4 * len(layout.kinds)

    def has_second_version() -> bool:
        return tiers(daemon.address)[0].used_bytes - at_rest >= states

    if registers_arena:
        wait_until(has_second_version)
    assert has_second_version() == registers_arena
    for group in layout.groups:
        lease = rank.call(
            "AcquireLeases",
            wants=[
                pb.AcquireLeasesRequest.Want(slab=pb.SlabName(group=group, kind=pb.KIND_PARAM), mode=READ, as_of_step=1)
            ],
        ).leases[0]
        assert lease.version <= 1
        rank.release(lease)
    rank.commit(2)
    wait_until(lambda: tiers(daemon.address)[0].used_bytes == at_rest)
    rank.assert_at(2)
