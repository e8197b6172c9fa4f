"""A job on two daemons: a step that was called safe is on both, and no reader sees one that the job then gives up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.contract.replica_names import name_replica
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, Stores, admin_of, serving
from tests.integration.support.following import following
from tests.integration.support.ranks import Launch
from tests.integration.support.settling_ranks import Plan
from tests.integration.support.store_client import Client, refused
from tests.integration.support.waiting import wait_until
from trainer_client import StoreClientSync, StoreError
from trainer_client.copying.follow import DaemonPlace, FollowerOrder

CONFIG = {"host_budget": "48MiB", "nvme_budget": "256MiB", "session_grace_seconds": 0.5}
MODULE = "tests.integration.support.settling_ranks"
END_SECONDS = 120.0
KILLED = -9
# The time for which a daemon is away: ranks that did not wait for it would have ended by then.
AWAY_SECONDS = 2.0


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with serving(tmp_path, ("first", "second"), CONFIG) as daemons:
        yield Stores(*daemons)


def plan_of(stores: Stores, job: str, until: int, **fields: Any) -> Plan:
    return Plan(job=job, addresses=(stores.first.address, stores.second.address), until=until, **fields)


@contextmanager
def launched(plan: Plan, directory: Path) -> Iterator[Launch]:
    directory.mkdir()
    path = directory / "plan.json"
    path.write_text(json.dumps(asdict(plan)))
    with Launch(MODULE, 2, (path, directory), directory) as launch:
        yield launch


def run(plan: Plan, directory: Path) -> dict[str, Any]:
    """Run both ranks to a good end, and return what rank 0 has seen."""
    with launched(plan, directory) as launch:
        assert launch.wait(END_SECONDS) == [0, 0], launch.output()
    return seen_by_rank_0(directory)


def seen_by_rank_0(directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((directory / "seen-0.json").read_text())
    return seen


def step_of(address: str, job: str, *, settled: bool = True) -> int | None:
    """Return the step that a reader gets which names none; None if there is none."""
    with StoreClientSync.connect(address) as client:
        try:
            with client.read(job, settled=settled) as reader:
                return reader.step
        except StoreError:
            return None


def committed(daemon: Daemon, job: str) -> int:
    with admin_of(daemon.address) as admin:
        jobs = admin.ListJobs(admin_pb.ListJobsRequest(), timeout=30).jobs
    return max((each.committed_step for each in jobs if each.name == job), default=-1)


def settled_steps(daemon: Daemon, job: str) -> dict[int, bool]:
    with admin_of(daemon.address) as admin:
        steps = admin.ListSteps(admin_pb.ListStepsRequest(job=job), timeout=30).steps
    return {step.step: step.settled for step in steps}


class Watcher:
    """The steps that a watcher of a job has seen, on a thread of its own."""

    def __init__(self, address: str, job: str) -> None:
        self.steps: list[int] = []
        self._client = StoreClientSync.connect(address)
        self._job = job
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            for commit in self._client.watch(self._job):
                self.steps.append(commit.step)
        except Exception:
            # The test closes the client.
            return

    def close(self) -> Sequence[int]:
        self._client.close()
        self._thread.join(10)
        return self.steps


def test_a_step_that_one_node_never_got_is_neither_called_safe_nor_shown(stores: Stores, tmp_path: Path) -> None:
    """Rank 1 dies before its vote for step 5. The next run goes on from step 4, and rank 0 alone waits for commits."""
    first, second, job = stores.first, stores.second, "lost"
    replica = name_replica(job, 0)
    run(plan_of(stores, job, until=1), tmp_path / "begin")
    watcher = Watcher(first.address, job)
    order = FollowerOrder(
        job=job,
        origin=DaemonPlace(address=first.address),
        holder=DaemonPlace(address=second.address),
        held_as=replica,
        finish_seconds=20,
    )
    with following(order):
        directory = tmp_path / "dies"
        with launched(plan_of(stores, job, until=9, dies=5), directory) as launch:
            codes = launch.wait(END_SECONDS)
            assert codes[1] == KILLED and codes[0] not in (0, KILLED), launch.output()
        seen = seen_by_rank_0(directory)
        assert seen["settled"] == [[step, step] for step in (2, 3, 4)]
        assert seen["raised"][0] == 5 and "restart the job" in seen["raised"][1]
        wait_until(lambda: committed(second, replica) == 4, seconds=60)
    assert (committed(first, job), committed(second, job)) == (5, 4)
    assert (step_of(first.address, job), step_of(first.address, job, settled=False)) == (4, 5)
    with StoreClientSync.connect(first.address) as client:
        (stored,) = client.list_jobs()
        assert (stored.step, stored.newest) == (4, 5)
    assert settled_steps(first, job) == {4: True, 5: False}
    assert committed(second, replica) == 4

    directory = tmp_path / "again"
    with launched(plan_of(stores, job, until=8, pauses=6), directory) as launch:
        wait_until((directory / "paused").exists, seconds=END_SECONDS)
        # The daemon that is started anew gets to know what is settled when the ranks attach, before another commit.
        first.kill()
        with Daemon(first.state_dir, CONFIG) as restarted:
            wait_until(lambda: step_of(restarted.address, job) == 6, seconds=60)
            (directory / "go-on").touch()
            assert launch.wait(END_SECONDS) == [0, 0], launch.output()
            seen = seen_by_rank_0(directory)
            assert seen["resumed"] == 4 and seen["settled"] == [[step, step] for step in (5, 6, 7, 8)]
            assert {step_of(address, job) for address in (restarted.address, second.address)} == {8}
    assert 5 not in watcher.close()[: watcher.steps.index(4) + 1]
    # The last settled step of a run is known after a restart, although no commit has followed it.
    second.kill()
    with Daemon(first.state_dir, CONFIG) as one, Daemon(second.state_dir, CONFIG) as other:
        assert (step_of(one.address, job), step_of(other.address, job)) == (8, 8)


def test_the_last_step_of_a_run_is_settled_although_a_daemon_dies_at_the_end(stores: Stores, tmp_path: Path) -> None:
    """The daemon of rank 0 is away while the ranks come to their ends, and dies again as soon as they have ended."""
    job, directory = "end", tmp_path / "ends"
    with launched(plan_of(stores, job, until=4, pauses=4), directory) as launch:
        wait_until((directory / "paused").exists, seconds=END_SECONDS)
        stores.first.kill()
        (directory / "go-on").touch()
        time.sleep(AWAY_SECONDS)
        with Daemon(stores.first.state_dir, CONFIG) as restarted:
            assert launch.wait(END_SECONDS) == [0, 0], launch.output()
            restarted.kill()
    stores.second.kill()
    with Daemon(stores.first.state_dir, CONFIG) as one, Daemon(stores.second.state_dir, CONFIG) as other:
        assert (step_of(one.address, job), step_of(other.address, job)) == (4, 4)


def test_a_step_that_all_nodes_have_is_settled_by_the_next_run(stores: Stores, tmp_path: Path) -> None:
    """Rank 1 dies after its vote for step 5 and before rank 0's, so that no rank finds out that both nodes have it."""
    job, directory = "arrived", tmp_path / "dies"
    with launched(plan_of(stores, job, until=9, stops=5), directory) as launch:
        wait_until((directory / "stopped").exists, seconds=END_SECONDS)
        wait_until(lambda: committed(stores.second, job) == 5, seconds=60)
        launch.ranks[1].kill()
        (directory / "go-on").touch()
        codes = launch.wait(END_SECONDS)
        assert codes[1] == KILLED and codes[0] not in (0, KILLED), launch.output()
    assert seen_by_rank_0(directory)["raised"][0] == 5
    assert committed(stores.first, job) == committed(stores.second, job) == 5
    addresses = stores.first.address, stores.second.address
    assert {step_of(address, job) for address in addresses} == {4}

    seen = run(plan_of(stores, job, until=6), tmp_path / "again")
    assert seen["resumed"] == 5 and seen["settled"] == [[6, 6]]
    assert {step_of(address, job) for address in addresses} == {6}


def test_a_run_that_only_resumes_settles_what_all_nodes_have(stores: Stores, tmp_path: Path) -> None:
    job, directory = "resumed", tmp_path / "dies"
    with launched(plan_of(stores, job, until=9, stops=3), directory) as launch:
        wait_until((directory / "stopped").exists, seconds=END_SECONDS)
        wait_until(lambda: committed(stores.second, job) == 3, seconds=60)
        launch.ranks[1].kill()
        (directory / "go-on").touch()
        launch.wait(END_SECONDS)
    assert step_of(stores.first.address, job) == 2
    assert run(plan_of(stores, job, until=3), tmp_path / "again")["resumed"] == 3
    assert {step_of(daemon.address, job) for daemon in (stores.first, stores.second)} == {3}


def test_with_replicas_each_wait_is_for_those_of_all_parts(stores: Stores, tmp_path: Path) -> None:
    job = "replicated"
    addresses = [stores.first.address, stores.second.address]
    section = {"replicas": 1, "replica": {"addresses": addresses}, "durability": "replicated"}
    directory = tmp_path / "run"
    with launched(plan_of(stores, job, until=4, section=section, pauses=3), directory) as launch:
        wait_until((directory / "paused").exists, seconds=END_SECONDS)
        # Rank 0 has waited for step 3: both holders have it, also that of the other rank's part.
        held = committed(stores.second, name_replica(job, 0)), committed(stores.first, name_replica(job, 1))
        assert min(held) >= 3, held
        (directory / "go-on").touch()
        assert launch.wait(END_SECONDS) == [0, 0], launch.output()


def test_with_snapshots_in_memory_a_run_goes_back_to_one_that_all_nodes_have(stores: Stores, tmp_path: Path) -> None:
    """Rank 0's node has overwritten step 5 by its step 6 when rank 1 dies before its vote for that one."""
    job, directory = "snapshots", tmp_path / "dies"
    plan = plan_of(stores, job, until=9, dies=6, home="cpu", section={"durability": "snapshot:2"})
    with launched(plan, directory) as launch:
        codes = launch.wait(END_SECONDS)
        assert codes[1] == KILLED and codes[0] not in (0, KILLED), launch.output()
    assert committed(stores.first, job) == 6
    seen = run(replace(plan, until=5, dies=0), tmp_path / "again")
    assert seen["resumed"] == 4


def test_a_client_of_an_earlier_release_sees_what_it_saw(stores: Stores, tmp_path: Path) -> None:
    job, directory = "earlier", tmp_path / "dies"
    with launched(plan_of(stores, job, until=9, dies=2), directory) as launch:
        launch.wait(END_SECONDS)
    earlier, today = Client(stores.first.address, capabilities=()), Client(stores.first.address)
    try:
        assert earlier.call("OpenReader", job=job).step == 2
        assert today.call("OpenReader", job=job).step == 1
        assert "settled-steps" in today.welcome.capabilities
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "has not opened a job"):
            today.call("SettleStep", step=1)
    finally:
        earlier.close()
        today.close()
