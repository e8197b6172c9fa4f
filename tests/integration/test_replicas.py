"""A job with replicas: a node that is lost loses no job, a holder that is lost stops no training, and both are seen."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainer_client
from paramserver.admin.cli import app
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token, remove_token
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.following import following
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import Launch
from tests.integration.support.training import Run, assert_bit_equal, launch
from tests.integration.support.waiting import wait_until
from trainer_client import ConfigError, Engine, JobConflictError, StoreClientSync, StoreUnavailableError
from trainer_client.client.transport.arena import MappedArena
from trainer_client.client.transport.credentials import NO_CREDENTIALS, Credentials
from trainer_client.copying.follow import DaemonPlace, Follower, FollowerOrder
from trainer_client.errors import UnauthenticatedError
from trainer_client.training.run.replicas import choose_holders

DAEMON = {"host_budget": "64MiB", "nvme_budget": "512MiB", "session_grace_seconds": 0.5}
# The most steps of a trainer that is lost. Its follower takes some seconds to start, in which a trainer without pauses
# would make hundreds of steps, and would leave the follower little of the processors.
LOST_STEPS = 2000
PAUSE_SECONDS = 0.1
# The steps after the one from which a run resumes.
FURTHER_STEPS = 5
KILLS = 10


@dataclass(frozen=True, slots=True)
class Nodes:
    """The daemons of two nodes; the second one holds the replicas of the first one's jobs."""

    own: Daemon
    holder: Daemon


@contextmanager
def nodes_in(directory: Path) -> Iterator[Nodes]:
    with ExitStack() as daemons:
        for name in ("own", "holder"):
            (directory / name).mkdir()
        yield Nodes(*(daemons.enter_context(Daemon(directory / name / "state", DAEMON)) for name in ("own", "holder")))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes for one test, which may kill their daemons."""
    with nodes_in(tmp_path) as own:
        yield own


@pytest.fixture(scope="module")
def lasting_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with nodes_in(tmp_path_factory.mktemp("lasting")) as lasting:
        yield lasting


@pytest.fixture
def shared(lasting_nodes: Nodes) -> Nodes:
    """Two nodes that several tests share, after the followers of the tests before have ended."""
    wait_until(lambda: not has_sessions(lasting_nodes.holder), seconds=60)
    return lasting_nodes


def replicated(nodes: Nodes, **section: Any) -> dict[str, Any]:
    """Return the section `paramserver` of a job of the first node, whose config names both daemons."""
    replica = {"addresses": [nodes.own.address, nodes.holder.address]} | section.pop("replica", {})
    return {"replicas": 1, "replica": replica, **section}


def job_info(daemon: Daemon, job: str) -> admin_pb.JobInfo | None:
    try:
        with admin_of(daemon.address) as store:
            listed = store.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs
    except grpc.RpcError:
        return None
    return next((one for one in listed if one.name == job), None)


def step_of(daemon: Daemon, job: str) -> int:
    """Return the newest committed step of a job at a daemon; -1: none."""
    found = job_info(daemon, job)
    return found.committed_step if found is not None and found.HasField("committed_step") else -1


def order_of(nodes: Nodes, job: str, *, finish_seconds: float) -> FollowerOrder:
    """Return the order to copy a job from the first node to the second one."""
    own, holder = (DaemonPlace.of(daemon.address, NO_CREDENTIALS) for daemon in (nodes.own, nodes.holder))
    return FollowerOrder(job=job, origin=own, holder=holder, finish_seconds=finish_seconds)


def replica_of(daemon: Daemon, job: str) -> admin_pb.JobInfo.Replica:
    """Return what the daemon of a job knows of its replica."""
    found = job_info(daemon, job)
    return found.replicas[0] if found is not None and found.replicas else admin_pb.JobInfo.Replica()


def followers_of(daemon: Daemon) -> set[int]:
    """Return the processes of the followers that have sessions at a daemon."""
    with admin_of(daemon.address) as store:
        clients = [one.client for one in store.ListSessions(admin_pb.ListSessionsRequest(), timeout=10).sessions]
    found = (re.match(r"follower at .*, process (\d+)", client) for client in clients)
    return {int(match[1]) for match in found if match}


# --- the node of the job is lost


def test_jobs_whose_node_is_lost_go_on_from_the_replicas_with_the_bits_of_an_uninterrupted_run(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Two jobs lose their node at the same time. The commits of one of them wait for the replica."""

    def run(address: str, job: str, steps: int, pause_seconds: float = 0.0, **section: Any) -> Run:
        config = config_of(address, job, "nvme", **section)
        return Run(
            steps=steps, clipping=0.5, schedule=True, with_masters=True, pause_seconds=pause_seconds, config=config
        )

    jobs = ("step", "replicated")
    with ExitStack() as launches:
        lost = []
        for job in jobs:
            first = run(nodes.own.address, job, LOST_STEPS, PAUSE_SECONDS, **replicated(nodes, durability=job))
            lost.append(launches.enter_context(launched(first, 2, tmp_path / job)))
        wait_until(
            lambda: all(step_of(nodes.holder, job) >= 3 for job in jobs) or not all(one.is_whole for one in lost),
            seconds=120,
        )
        assert all(one.is_whole for one in lost), "\n".join(one.output() for one in lost)
        followers = followers_of(nodes.holder)
        assert len(followers) == 2
        nodes.own.kill()
        for rank in (rank for one in lost for rank in one.ranks):
            rank.kill()
        for follower in followers:
            os.kill(follower, signal.SIGKILL)
    with Daemon(nodes.own.state_dir, DAEMON) as looked_at:
        committed = step_of(looked_at, "replicated")
    shutil.rmtree(nodes.own.state_dir)
    held = {job: step_of(nodes.holder, job) for job in jobs}
    assert min(held.values()) >= 3
    # The last commit of the lost daemon was not confirmed to the trainer if the holder lacks it.
    assert committed - held["replicated"] in (0, 1)

    # The config still names the daemon of the lost node.
    section = replicated(nodes, durability="step")
    wait_until(lambda: not has_sessions(nodes.holder), seconds=60)
    steps = max(held.values()) + FURTHER_STEPS
    *resumed, whole = launch(
        [
            *(run(nodes.holder.address, job, steps, resume="must", **section) for job in jobs),
            run(nodes.holder.address, "whole", steps),
        ],
        2,
        tmp_path,
    )

    for job, result in zip(jobs, resumed, strict=True):
        assert result.resumed_step == held[job]
        assert_bit_equal(result, replace(whole, losses=whole.losses[held[job] :], norms=whole.norms[held[job] :]))


@contextmanager
def launched(run: Run, world_size: int, directory: Path) -> Iterator[Launch]:
    """Start the ranks of a run, which are killed at the end."""
    directory.mkdir()
    plan = directory / "plan.json"
    plan.write_text(json.dumps([asdict(run)]))
    with Launch("tests.integration.support.training", world_size, (plan, directory / "lost.pt"), directory) as launch:
        yield launch


def has_sessions(daemon: Daemon) -> bool:
    with admin_of(daemon.address) as store:
        return bool(store.ListSessions(admin_pb.ListSessionsRequest(), timeout=10).sessions)


def test_a_follower_outlives_its_trainer_and_finishes_the_newest_step(shared: Nodes, tmp_path: Path, job: str) -> None:
    """The follower itself is killed before, and the trainer starts the next one."""
    config = config_of(shared.own.address, job, "nvme", **replicated(shared))
    run = Run(steps=LOST_STEPS, pause_seconds=PAUSE_SECONDS, config=config)
    with launched(run, 1, tmp_path / "lost") as lost:
        wait_until(lambda: step_of(shared.holder, job) >= 1, seconds=120)
        (first,) = followers_of(shared.holder)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: followers_of(shared.holder) - {first}, seconds=120)
        assert lost.is_whole, lost.output()
        lost.ranks[0].kill()
        lost.ranks[0].wait()
        committed = step_of(shared.own, job)
        wait_until(lambda: not has_sessions(shared.holder) and not has_sessions(shared.own), seconds=60)
    assert step_of(shared.own, job) == step_of(shared.holder, job) >= committed


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.layers[0].requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return hidden


@contextmanager
def started(
    address: str, job: str, width: int = 64, checkpoint: Path | None = None, **section: Any
) -> Iterator[Engine]:
    config = config_of(address, job, "nvme", **section) | {"optimizer": {"type": "AdamW"}}
    engine, *_ = trainer_client.initialize(model=Model(width), config=config, checkpoint=checkpoint)
    try:
        yield engine
    finally:
        engine.close_without_commit()


def train(engine: Engine, steps: Sequence[int]) -> None:
    module = engine.module
    assert isinstance(module, Model)
    for step in steps:
        inputs = torch.randn(2, module.width, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(inputs).square().mean())
        engine.step()


def test_a_replaced_node_begins_with_the_replica_and_an_unchanged_config(
    nodes: Nodes, tmp_path: Path, job: str
) -> None:
    section = replicated(nodes)
    with started(nodes.own.address, job, **section) as engine:
        train(engine, range(1, 6))
        weights = engine.full_state_dict()
    assert step_of(nodes.holder, job) == 5
    nodes.own.kill()
    shutil.rmtree(nodes.own.state_dir)

    with Daemon(nodes.own.state_dir, DAEMON) as replaced, started(replaced.address, job, **section) as engine:
        assert engine.resumed_step == 5
        assert all(torch.equal(value, weights[name]) for name, value in engine.full_state_dict().items())
        train(engine, range(6, 8))
        engine.wait_for_commit()
        # The new layout has a commit of its own.
        wait_until(lambda: step_of(nodes.holder, job) == 8)


def test_an_empty_store_begins_with_the_replica_or_not_at_all(nodes: Nodes, tmp_path: Path, job: str) -> None:
    """A checkpoint is not imported in place of a replica, and neither it nor the model while the holder is away."""
    checkpoint = tmp_path / "pytorch_model.bin"
    torch.save(Model().state_dict(), checkpoint)
    with started(nodes.holder.address, job) as engine:
        train(engine, [1, 2])
    # A daemon that does not answer is no obstacle where another one has a step.
    addresses = [f"unix:{tmp_path}/gone", nodes.holder.address]
    section: dict[str, Any] = replicated(nodes, replica={"addresses": addresses})
    with started(nodes.own.address, job, checkpoint=checkpoint, **section) as engine:
        assert engine.resumed_step == 2
    with admin_of(nodes.own.address) as store:
        store.DeleteJob(admin_pb.DeleteJobRequest(job=job))

    nodes.holder.kill()
    with (
        pytest.raises(JobConflictError, match=f"not begun with the checkpoint.*{nodes.holder.socket}"),
        started(nodes.own.address, job, checkpoint=checkpoint, **section),
    ):
        pass
    assert job_info(nodes.own, job) is None
    with (
        pytest.raises(JobConflictError, match=str(nodes.holder.socket)),
        started(nodes.own.address, job, **replicated(nodes)),
    ):
        pass


# --- what a commit waits for


def test_with_durability_replicated_a_commit_is_made_when_the_holder_has_it(shared: Nodes, job: str) -> None:
    section = replicated(shared, durability="replicated", replica={"timeout_seconds": 15.0})
    with started(shared.own.address, job, **section) as engine:
        for step in range(1, 5):
            train(engine, [step])
            engine.wait_for_commit()
            assert step_of(shared.holder, job) == step
        wait_until(lambda: replica_of(shared.own, job).step == 4)
        replica = replica_of(shared.own, job)
        # The frozen layer goes there once, with step 0, and the moments from step 1 on.
        frozen, *trained = (sum(p.numel() for p in layer.parameters()) for layer in Model().layers)
        assert replica.sent_bytes == 4 * (frozen + sum(trained)) + 4 * (3 * 4 * sum(trained))
        shared.holder.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailableError, match=r"step 5 is committed, but after 15 s the daemon at"):
                train(engine, [5, 6])
        finally:
            shared.holder.process.send_signal(signal.SIGCONT)
    assert step_of(shared.own, job) == 5


def test_too_few_other_daemons_are_an_error_that_says_what_to_write(shared: Nodes, job: str) -> None:
    own: dict[str, Any] = {"replicas": 1, "replica": {"addresses": [shared.own.address]}}
    with (
        pytest.raises(ConfigError, match="names 0 daemons besides the job's own"),
        started(shared.own.address, job, **own),
    ):
        pass
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"replicas": 1}, r"replica\.addresses"),
        ({"durability": "replicated"}, "replicas to 1"),
    )
    for section, message in wrong:
        with pytest.raises(ConfigError, match=message), started(shared.own.address, job, **section):
            pass


def test_two_addresses_of_one_daemon_are_one_holder(shared: Nodes, tmp_path: Path) -> None:
    with StoreClientSync.connect(shared.own.address) as client:
        own = client.epoch
    twice = [shared.holder.address, f"unix://{shared.holder.socket}"]
    choose = partial(choose_holders, own_epoch=own, credentials=NO_CREDENTIALS, is_ring=False)
    gone = f"unix:{tmp_path}/gone.sock"

    assert choose([shared.own.address, gone, *twice], 2) == [shared.holder.address, gone]
    with pytest.raises(ConfigError, match="names 1 daemons besides the job's own"):
        choose([shared.own.address, *twice], 2)


# --- the holder is lost, full or slow


def test_training_goes_on_without_the_holder_and_the_follower_catches_up(nodes: Nodes, job: str) -> None:
    """The holder first stands still, which costs steps of the replica only, and is then lost."""
    with started(nodes.own.address, job, **replicated(nodes)) as engine:
        train(engine, [1])
        wait_until(lambda: replica_of(nodes.own, job).step == 1)
        nodes.holder.process.send_signal(signal.SIGSTOP)
        try:
            train(engine, range(2, 20))
            engine.wait_for_commit()
            assert replica_of(nodes.own, job).lag_steps == 18
            with admin_of(nodes.own.address) as store:
                held = store.ListSteps(admin_pb.ListStepsRequest(job=job), timeout=10).steps
            # The newest step, and the one that the follower reads.
            assert len(held) <= 2
        finally:
            nodes.holder.process.send_signal(signal.SIGCONT)
        wait_until(lambda: step_of(nodes.holder, job) == 19, seconds=60)
        wait_until(lambda: replica_of(nodes.own, job).step == 19)
        assert replica_of(nodes.own, job).lag_seconds == 0

        nodes.holder.kill()
        train(engine, range(20, 24))
        engine.wait_for_commit()
        wait_until(lambda: bool(replica_of(nodes.own, job).problem))
        behind = replica_of(nodes.own, job)
        assert (behind.step, behind.lag_steps) == (19, 4)
        time.sleep(0.1)
        assert replica_of(nodes.own, job).lag_seconds >= behind.lag_seconds + 0.1
        shown = CliRunner().invoke(app, ["jobs", "--address", nodes.own.address], env={"COLUMNS": "300"}).output
        assert "19, 4 behind for" in shown and f"replica of {job}" in shown

        with Daemon(nodes.holder.state_dir, DAEMON) as again:
            wait_until(lambda: step_of(again, job) == 23, seconds=60)
            wait_until(lambda: not replica_of(nodes.own, job).lag_steps)
            assert not replica_of(nodes.own, job).problem
            with admin_of(nodes.own.address) as store:
                events = store.ListEvents(admin_pb.ListEventsRequest(kinds=["job"]), timeout=10).events
            texts = [event.text for event in events if event.subject == job]
            assert any("gets no steps: " in text for text in texts)
            assert any("gets steps again, and has step 23" in text for text in texts), texts


def test_a_follower_without_a_trainer_does_not_bring_back_a_holder_that_another_run_has_not(
    shared: Nodes, tmp_path: Path, job: str
) -> None:
    """The holder is lost for good. Its follower tries until its time is over, beside a run with another config."""
    tensors = {"weight": torch.zeros(64)}
    gone = DaemonPlace.of(f"unix:{tmp_path}/gone.sock", NO_CREDENTIALS)
    order = replace(order_of(shared, job, finish_seconds=1.0), holder=gone)
    with StoreClientSync.connect(shared.own.address) as client:
        with client.open(job, tensors) as writer:
            writer.put(tensors)
            writer.commit()
        with following(order) as follower:
            wait_until(lambda: bool(replica_of(shared.own, job).problem))
            shown = replica_of(shared.own, job)
            assert (shown.holder, shown.lag_steps) == (order.holder.address, 1)
            follower.finish()
            with client.open(job, tensors) as writer:
                writer.put(tensors)
                writer.commit()
        found = job_info(shared.own, job)
    assert found is not None and found.committed_step == 1 and not found.replicas


def test_a_follower_without_a_trainer_does_not_bring_back_a_holder_that_it_has_reached_late(
    nodes: Nodes, tmp_path: Path, job: str
) -> None:
    """The holder is away until a run without replicas has opened the job. It gets the newest step all the same."""
    tensors = {"weight": torch.zeros(64)}
    order = order_of(nodes, job, finish_seconds=60.0)
    nodes.holder.kill()
    with StoreClientSync.connect(nodes.own.address) as client:
        with client.open(job, tensors) as writer:
            writer.put(tensors)
            writer.commit()
        with following(order) as follower:
            wait_until(lambda: bool(replica_of(nodes.own, job).problem))
            follower.finish()
            with client.open(job, tensors) as writer:
                writer.put(tensors)
                writer.commit()
            with Daemon(tmp_path / "holder" / "state", DAEMON) as holder:
                wait_until(lambda: follower.state.step == 1)
                assert step_of(holder, job) == 1
    found = job_info(nodes.own, job)
    assert found is not None and found.committed_step == 1 and not found.replicas


def test_a_follower_ends_though_it_has_heard_of_a_step_that_was_rolled_back(
    nodes: Nodes, tmp_path: Path, job: str
) -> None:
    """It has heard of step 3 while the holder was away, and copies step 2, which is the newest one then."""
    tensors = {"weight": torch.zeros(64)}
    with (
        StoreClientSync.connect(nodes.own.address) as client,
        client.open(job, tensors, durability="snapshot:2") as writer,
    ):
        for _ in range(4):
            writer.put(tensors)
            writer.commit()
    nodes.holder.kill()
    order = order_of(nodes, job, finish_seconds=1.0)
    follower = Follower(order, lambda _: None)
    thread = threading.Thread(target=follower.run)
    with ExitStack() as stack:
        stack.callback(thread.join)
        thread.start()
        stack.callback(follower.finish)
        wait_until(lambda: bool(follower.state.problem))
        with admin_of(nodes.own.address) as store:
            store.RollBackJob(admin_pb.RollBackJobRequest(job=job, step=2), timeout=30)
        holder = stack.enter_context(Daemon(tmp_path / "holder" / "state", DAEMON))
        wait_until(lambda: step_of(holder, job) == 2)
        follower.finish()
        wait_until(lambda: not thread.is_alive())


@pytest.mark.parametrize("maps", [0, 1], ids=["while it watches", "while it copies"])
def test_a_follower_goes_on_after_a_shortage_of_memory(
    shared: Nodes, job: str, monkeypatch: pytest.MonkeyPatch, maps: int
) -> None:
    """It maps the memory of the job's daemon, and then that of the holder; one of these fails once."""
    tensors = {"weight": torch.zeros(64)}
    with StoreClientSync.connect(shared.own.address) as client, client.open(job, tensors) as writer:
        writer.put(tensors)
        writer.commit()
    really_map, are_short = MappedArena.map, [*[False] * maps, True]

    def map_later(*arguments: Any, **options: Any) -> Any:
        if are_short and are_short.pop(0):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return really_map(*arguments, **options)

    monkeypatch.setattr(MappedArena, "map", map_later)
    order = order_of(shared, job, finish_seconds=20.0)
    with following(order):
        wait_until(lambda: step_of(shared.holder, job) == 0)
        wait_until(lambda: not replica_of(shared.own, job).problem)
    assert not are_short


def accepts(daemon: Daemon, token: str) -> bool:
    try:
        StoreClientSync.connect(daemon.address, credentials=Credentials(token=token)).close()
    except UnauthenticatedError:
        return False
    return True


def test_a_follower_goes_on_with_the_token_that_has_replaced_its_own(tmp_path: Path, job: str) -> None:
    """As the runbook has it: the new token is in the trainer's file before the old one is removed at the daemons."""
    tokens, token_file = tmp_path / "tokens.toml", tmp_path / "token"
    operator = Credentials(token=add_token(tokens, "operator", Role.ADMIN))
    old = add_token(tokens, "old", Role.JOB, [job])
    token_file.write_text(old)
    tensors = {"weight": torch.zeros(64)}
    with ExitStack() as stack:
        config = DAEMON | {"token_file": str(tokens)}
        daemons = [stack.enter_context(Daemon(tmp_path / name, config)) for name in ("own", "holder")]
        own, holder = daemons
        order = FollowerOrder(
            job=job,
            origin=DaemonPlace.of(own.address, Credentials(token_file=token_file)),
            holder=DaemonPlace.of(holder.address, Credentials(token_file=token_file)),
            finish_seconds=20.0,
        )

        def held() -> int | None:
            with StoreClientSync.connect(holder.address, credentials=operator) as client:
                return next((stored.step for stored in client.list_jobs() if stored.name == job), None)

        client = stack.enter_context(StoreClientSync.connect(own.address, credentials=operator))
        writer = stack.enter_context(client.open(job, tensors))
        writer.put(tensors)
        writer.commit()
        stack.enter_context(following(order))
        wait_until(lambda: held() == 0)

        new = add_token(tokens, "new", Role.JOB, [job])
        token_file.write_text(new)
        remove_token(tokens, "old")
        wait_until(lambda: all(accepts(daemon, new) and not accepts(daemon, old) for daemon in daemons))
        writer.put(tensors)
        writer.commit()
        wait_until(lambda: held() == 1)


def test_a_full_holder_is_named(shared: Nodes, tmp_path: Path, job: str) -> None:
    with Daemon(tmp_path / "full", DAEMON | {"nvme_budget": "1MiB"}) as full:
        replica = {"addresses": [full.address], "timeout_seconds": 1.0}
        section: dict[str, Any] = {"replicas": 1, "replica": replica}
        with started(shared.own.address, job, width=256, **section) as engine:
            train(engine, range(1, 4))
            engine.wait_for_commit()
            wait_until(lambda: "nvme_budget" in replica_of(shared.own, job).problem)
        assert step_of(full, job) == -1


# --- the daemon of the job is killed at any moment of a copy


def has_caught_up(own: Daemon, holder: Daemon, job: str) -> bool:
    return step_of(holder, job) == step_of(own, job)


def test_a_replica_is_a_whole_step_whenever_the_daemon_that_it_is_of_is_killed(nodes: Nodes, job: str) -> None:
    """Each step writes its number into all tensors but one, so a mixture of two steps would be seen."""
    rng = random.Random(7)
    tensors = {f"layer.{number}": torch.zeros(64, 1024) for number in range(12)} | {"frozen": torch.zeros(512)}
    order = order_of(nodes, job, finish_seconds=20.0)
    seen: list[int] = []
    with ExitStack() as daemons, following(order):
        own = nodes.own
        for _ in range(KILLS):
            with StoreClientSync.connect(own.address) as client, client.open(job, tensors) as writer:
                kill_at, before = time.monotonic() + rng.uniform(0.1, 0.8), writer.step
                while time.monotonic() < kill_at or writer.step == before:
                    step = 0 if writer.step is None else writer.step + 1
                    changed = tensors if step == 0 else {name: t for name, t in tensors.items() if name != "frozen"}
                    writer.put({name: torch.full_like(value, step) for name, value in changed.items()})
                    writer.commit()
                own.kill()
            if step_of(nodes.holder, job) >= 0:
                with StoreClientSync.connect(nodes.holder.address) as client, client.read(job) as reader:
                    seen.append(reader.step)
                    found = {name: reader.get(name).unique().tolist() for name in tensors}
                assert found == {name: [0.0 if name == "frozen" else float(seen[-1])] for name in tensors}
            own = daemons.enter_context(Daemon(own.state_dir, DAEMON))
            wait_until(partial(has_caught_up, own, nodes.holder, job), seconds=60)
    assert seen == sorted(seen) and len(set(seen)) > KILLS // 2, seen
