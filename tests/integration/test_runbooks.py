"""The commands of docs/runbooks.md do what the page says, under a job that trains or that resumes afterwards.

Where the job goes on, no rank ends. In every case it ends up with the bits of a job that nothing happened to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.namespaces import switched, why_not_switched
from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import ROOT
from tests.integration.support.operated_run import NO_LIMIT, Plan
from tests.integration.support.operations import PAGE, Machine, Training, commands
from tests.integration.support.ranks import free_port
from tests.integration.support.waiting import wait_until

COMMANDS = commands()
PREPARE, SHELL = COMMANDS["The example"]
START = "systemctl start paramserver@alice"
VERSIONS = "paramserver-admin versions gpt2"
NODES = ("10.0.0.5:7411", "10.0.0.6:7411", "10.0.0.7:7411")

NVME = {"device": "nvme"}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME},
    "paramserver": {"job": "gpt2"},
}
BUDGETS = {"nvme_budget": "256MiB", "host_budget": "32MiB"}
PAUSE_SECONDS = 0.2


def of_page(language: str, number: int = 0) -> str:
    """Return a block of the page in a language, the first one by default."""
    text = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)[number]
    assert isinstance(text, str)
    return text


def set_up(machine: Machine, node: str, credentials_of: Machine | None = None) -> None:
    """Write the configuration of the page for one of its nodes, and copy the credentials of another machine."""
    machine.configure(of_page("toml").replace(NODES[0], node))
    machine.remember(SHELL)
    (machine.directory / "mnt/nvme1").mkdir(exist_ok=True)
    if credentials_of is not None:
        etc = "etc/paramserver"
        for path in (credentials_of.directory / etc).iterdir():
            if path.name != "alice.toml":
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, machine.directory / etc / path.name)


def uninterrupted(directory: Path, plan: Plan, ranks: int, steps: int) -> Training:
    """Train with a daemon of its own, on which no operator works, and return the job."""
    machine = Machine(directory / "quiet", {NODES[0]: ""}, NODES[0])
    job = Training(replace(plan, directory=str(directory / "whole"), pause_seconds=0.0), [machine] * ranks)
    try:
        with Daemon(directory / "quiet-state", BUDGETS) as daemon:
            job.allow(steps, and_end=True)
            job.start({"PARAMSERVER_ADDRESS": daemon.address})
            assert job.ended() == [0] * ranks, job.log
    finally:
        job.close()
        machine.close()
    return job


def check_same_bits(job: Training, directory: Path) -> None:
    """Check every loss that the ranks had, and their weights and optimizer states at the end."""
    whole = uninterrupted(directory, job.plan, len(job.ranks), job.step)
    assert job.losses() == whole.losses()
    for one, other in zip(job.results(), whole.results(), strict=True):
        for kind in ("weights", "moments"):
            assert one[kind].keys() == other[kind].keys()
            assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())


# --- one node: a job of two ranks goes through all that a daemon's operator does


@dataclass(frozen=True, slots=True)
class Site:
    """A machine and the job that trains on it; and whether its state directory is on a small file system."""

    machine: Machine
    job: Training
    has_small_disk: bool


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    machine = Machine(directory / "machine", {NODES[0]: f"127.0.0.1:{free_port()}"}, NODES[0])
    plan = Plan(directory=str(directory / "job"), config=CONFIG, pause_seconds=PAUSE_SECONDS)
    job = Training(plan, [machine, machine])
    try:
        set_up(machine, NODES[0])
        has_small_disk = machine.mount_small_disk()
        machine.sh(PREPARE)
        job.start()
        job.allow(1)
        job.wait_for(1)
        yield Site(machine, job, has_small_disk)
    finally:
        job.close()
        machine.close()


def test_a_daemon_is_upgraded_or_restarted(site: Site) -> None:
    (upgrade,) = COMMANDS["A daemon is upgraded or restarted"]
    with site.job.going_on():
        shown = site.machine.sh(upgrade)
    assert "drained: ready to stop (2 sessions have nothing uncommitted)" in shown
    assert "the store daemon at" in site.job.log and "the run goes on after" in site.job.log


def test_certificates_are_renewed(site: Site) -> None:
    (renew,) = COMMANDS["Certificates are renewed"]
    key = site.machine.directory / "etc/paramserver/tls/trainer-key.pem"
    before = key.read_bytes()
    with site.job.going_on():
        assert site.machine.sh(renew).splitlines()[-1] == "SERVING"
        assert key.read_bytes() != before
    assert "changed certificates are in use for new connections" in site.machine.journal


def test_a_token_is_replaced_or_revoked(site: Site) -> None:
    change, revoke, again = COMMANDS["A token is replaced or revoked"]
    with site.job.going_on():
        site.machine.sh(change)
    site.machine.sh(revoke)
    site.job.allow(NO_LIMIT)
    assert all(site.job.ended())
    assert "UnauthenticatedError" in site.job.log
    assert "`paramserver tokens list` shows" in site.job.log and "start the job again" in site.job.log
    site.machine.sh(again)
    site.job.resume()


def test_budgets_are_changed(site: Site) -> None:
    change, lower, back = COMMANDS["Budgets are changed"]
    with site.job.going_on():
        shown = site.machine.sh(change)
        assert shown.startswith("a restart is needed for: host_budget, nvme_budget\n") and " 384.0 MiB " in shown
        site.machine.sh(lower, code=1)
        assert "the configuration stays as it is: nvme_budget 1.0 MiB is too small" in site.machine.told
        assert "write at least " in site.machine.told
        assert site.machine.sh(back) == "nothing has changed\n"


def test_a_disk_is_replaced(site: Site) -> None:
    (change,) = COMMANDS["A disk is replaced"]
    (site.machine.directory / "mnt/nvme2").mkdir()
    with site.job.going_on():
        assert "verified: no damage" in site.machine.sh(change)
        shutil.rmtree(site.machine.directory / "mnt/nvme1")


def test_a_disk_is_full(site: Site) -> None:
    (make_room,) = COMMANDS["A disk is full"]
    if not site.has_small_disk:
        pytest.skip("a full disk needs the right to mount a tmpfs")
    # SQLite's journal is short after a start, so the next commits extend it.
    site.machine.sh("systemctl restart paramserver@alice")
    with (site.machine.directory / "var/lib/paramserver/core.4711").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 14))
    site.job.allow(NO_LIMIT)
    assert all(site.job.ended())
    assert "StoreBudgetError" in site.job.log and "catalog.sqlite is full; free space there" in site.job.log
    site.machine.sh(make_room)
    site.job.resume()


def test_the_job_that_went_through_all_of_it_has_the_bits_of_a_quiet_one(site: Site, tmp_path: Path) -> None:
    site.job.finish(site.job.step + 2)
    check_same_bits(site.job, tmp_path)


# --- jobs that are stopped and resume elsewhere


@contextmanager
def machines_of(directory: Path, nodes: Sequence[str], *, apart: bool) -> Iterator[list[Machine]]:
    """Machines at the addresses of the page, in network namespaces (`apart`), or else at loopback addresses."""
    with ExitStack() as cleanup:
        addresses = {node: f"127.0.0.1:{free_port()}" for node in nodes}
        namespaces = [""] * len(nodes)
        if apart:
            namespaces = cleanup.enter_context(switched([node.rpartition(":")[0] for node in nodes]))
            addresses = {node: node for node in nodes}
        machines = []
        for number, (node, namespace) in enumerate(zip(nodes, namespaces, strict=True)):
            machine = Machine(directory / f"node-{number}", addresses, node, namespace)
            cleanup.callback(machine.close)
            machines.append(machine)
        yield machines


@pytest.mark.runbooks
def test_damage_is_found_a_job_moves_and_a_nodes_disks_are_moved(tmp_path: Path) -> None:
    """One job of two ranks goes through all of it. It has no dropout, because an export has no random states."""
    (why_degraded,) = COMMANDS["A tier is degraded"]
    keep, verify, look, go_back = COMMANDS["Damage is found"]
    (clean_up,) = COMMANDS["A job moves to another node"]
    adopt, _, _ = COMMANDS["A node is replaced"]
    plan = Plan(directory=str(tmp_path / "job"), config=CONFIG, dropout=0.0)
    with machines_of(tmp_path / "machines", NODES, apart=False) as (first, second, third):
        set_up(first, NODES[0])
        first.sh(PREPARE)
        set_up(second, NODES[1], first)
        set_up(third, NODES[2], first)
        second.sh(START)
        job = Training(plan, [first, first])
        try:
            job.start()
            job.allow(2)
            job.wait_for(2)
            # The trainer does not wait for the commit of a step.
            wait_until(lambda: newest_steps(first.sh(VERSIONS)) == [2])
            first.sh(keep)
            data = first.directory / "mnt/nvme1/paramserver/data.1"
            before = data.read_bytes()
            job.finish(3)
            damage_what_is_new(data, before)
            first.sh(verify, code=4)
            assert "24 damaged or unreadable places" in first.said and "at step 3: bytes 0 to" in first.said
            shown = first.sh(why_degraded)
            assert "degraded" in shown and "gpt2, layout " in shown and "at step 3 is damaged" in shown
            assert "monday" in first.sh(look)
            job.allow(4, and_end=True)
            job.start()
            assert all(job.ended()) and "DataLossError" in job.log
            assert "step 2 of gpt2" in first.sh(go_back)
            job.finish(4)

            moved = json.loads(second.placed(of_page("json")))["paramserver"]
            job.change(replace(plan, config=CONFIG | {"paramserver": moved}), [second, second])
            job.finish(5)
            assert second.sh(clean_up) == "deleted job gpt2\n"

            second.sh("systemctl stop paramserver@alice")
            for part in ("var/lib/paramserver/alice", "mnt/nvme1/paramserver"):
                shutil.copytree(second.directory / part, third.directory / part)
            assert "verified: no damage" in third.sh(adopt)
            job.change(plan, [third, third])
            job.finish(6)
        finally:
            job.close()
    check_same_bits(job, tmp_path)


def newest_steps(versions: str) -> list[int]:
    """Return the newest committed step from the output of `paramserver-admin versions`; [] if there is none."""
    return [int(step) for step in re.findall(r"^\W*(\d+)\W+newest", versions, flags=re.MULTILINE)]


def damage_what_is_new(data: Path, before: bytes) -> None:
    """Overwrite all pages of a data file that have changed since it had the bytes `before`."""
    now = bytearray(data.read_bytes())
    for offset in range(0, len(now), 4096):
        if now[offset : offset + 4096] != before[offset : offset + 4096]:
            now[offset : offset + 4096] = bytes(4096)
    with data.open("r+b") as file:
        file.write(now)


# --- several nodes, in network namespaces with mutual TLS


@pytest.fixture(scope="module")
def no_switch() -> str | None:
    """The reason why this machine can have no network namespaces on a switch; None if it can."""
    return why_not_switched()


@pytest.mark.runbooks
def test_a_node_is_lost_whose_job_has_a_replica(tmp_path: Path, no_switch: str | None) -> None:
    """The job has two ranks on one node. Its follower and its ranks are lost with the node, and the job has dropout."""
    look, see, replaced = COMMANDS["A node is lost whose jobs have replicas"]
    section = json.loads(of_page("json", 1))["paramserver"] | {"durability": "replicated"}
    with machines_of(tmp_path / "nodes", NODES[:2], apart=no_switch is None) as machines:
        first, second = machines
        config = CONFIG | {"paramserver": json.loads(first.placed(json.dumps(section)))}
        plan = Plan(directory=str(tmp_path / "job"), config=config, pause_seconds=PAUSE_SECONDS)
        set_up(first, NODES[0])
        first.sh(PREPARE)
        set_up(second, NODES[1], first)
        second.sh(START)
        job = Training(plan, [first, first])
        try:
            job.start()
            job.allow(3)
            job.wait_for(3)
            assert "gpt2" in first.sh(look)
            job.allow(NO_LIMIT)
            (follower,) = followers_of(second)
            for rank in job.ranks:
                rank.kill()
            os.kill(follower, signal.SIGKILL)
            first.lose()
            assert all(job.ended())
            held = newest_steps(second.sh(see))
            lost_at = job.step
            # No other daemon is there that a commit could wait for.
            alone = config["paramserver"] | {"durability": "step"}
            plan = replace(plan, config=config | {"paramserver": alone})
            job.change(plan, [second, second])
            job.allow(lost_at + 2)
            job.start()
            job.wait_for(lost_at + 1)
            set_up(first, NODES[0])
            first.sh(START)
            assert "gpt2" in second.sh(replaced)
            job.finish(lost_at + 3)
        finally:
            job.close()
    # The step that was under way had no commit that was confirmed to the ranks.
    assert [result["resumed_step"] for result in job.results()] == held * 2
    assert held[0] >= lost_at - 1
    job.plan = replace(plan, config=CONFIG)
    check_same_bits(job, tmp_path)


def followers_of(machine: Machine) -> set[int]:
    """Return the processes of the followers that have sessions at a machine's daemon."""
    listed = json.loads(machine.sh("paramserver-admin sessions --json"))["sessions"]
    found = [re.match(r"follower at .*, process (\d+)", session["client"]) for session in listed]
    return {int(match[1]) for match in found if match}


@pytest.mark.runbooks
def test_two_nodes_are_upgraded_under_a_job_and_one_of_them_is_lost(tmp_path: Path, no_switch: str | None) -> None:
    """The configuration is that of deploy/systemd. Without network namespaces the nodes have loopback addresses."""
    (upgrade,) = COMMANDS["A daemon is upgraded or restarted"]
    _, export, start_again = COMMANDS["A node is replaced"]
    plan = Plan(directory=str(tmp_path / "job"), config=CONFIG, dropout=0.0, pause_seconds=PAUSE_SECONDS)
    with machines_of(tmp_path / "nodes", NODES[:2], apart=no_switch is None) as machines:
        first, second = machines
        set_up(first, NODES[0])
        first.sh(PREPARE)
        set_up(second, NODES[1], first)
        second.sh(START)
        job = Training(plan, machines)
        try:
            job.start()
            with job.going_on():
                for machine in machines:
                    machine.sh(upgrade)
                first.sh(export)
            job.allow(NO_LIMIT)
            job.ranks[1].kill()
            second.lose()
            assert all(job.ended())
            lost_at = job.step
            set_up(second, NODES[1])
            second.sh(START)
            (exported,) = re.findall(r"gpt2: committed as step (\d+), from", first.sh(start_again))
            job.finish(lost_at + 1)
        finally:
            job.close()
    assert [result["resumed_step"] for result in job.results()] == [int(exported)] * 2
    check_same_bits(job, tmp_path)


@pytest.mark.runbooks
@pytest.mark.parametrize("count", [2, 3])
def test_nodes_with_the_configuration_of_kubernetes_are_upgraded_under_a_job(
    tmp_path: Path, no_switch: str | None, count: int
) -> None:
    """The daemons have the file of the component `tls`; the job has dropout, and one rank on each node."""
    if no_switch is not None:
        pytest.skip(no_switch)
    (upgrade,) = COMMANDS["A daemon is upgraded or restarted"]
    config = (ROOT / "deploy/kubernetes/components/tls/paramserver.toml").read_text()
    plan = Plan(directory=str(tmp_path / "job"), config=CONFIG, pause_seconds=PAUSE_SECONDS)
    with machines_of(tmp_path / "nodes", NODES[:count], apart=True) as machines:
        for machine in machines:
            set_up(machine, NODES[0], None if machine is machines[0] else machines[0])
            machine.configure(config, whole=True)
            machine.sh(PREPARE if machine is machines[0] else START)
        job = Training(plan, machines)
        try:
            job.start()
            for machine in machines:
                with job.going_on():
                    machine.sh(upgrade)
            job.finish(job.step + 1)
        finally:
            job.close()
    assert all(result["restarts"] == 1 for result in job.results())
    check_same_bits(job, tmp_path)


@pytest.mark.runbooks
@pytest.mark.parametrize("count", [2, 3])
def test_a_node_of_several_is_lost_under_a_job_whose_parts_have_replicas(
    tmp_path: Path, no_switch: str | None, count: int
) -> None:
    """Each node has a rank, with dropout, and the file of the component `tls`. The last one is lost with its disks."""
    if no_switch is not None:
        pytest.skip(no_switch)
    config = (ROOT / "deploy/kubernetes/components/tls/paramserver.toml").read_text()
    # The ranks whose holder was lost end after this time. The followers start within it, too, also on a busy machine:
    # with 20 s the first commit failed while 20 other processes were running.
    replica = {"addresses": list(NODES[:count]), "timeout_seconds": 60.0}
    section = {"replicas": 1, "replica": replica, "durability": "replicated"}
    job_config = CONFIG | {"paramserver": CONFIG["paramserver"] | section}
    plan = Plan(directory=str(tmp_path / "job"), config=job_config, pause_seconds=PAUSE_SECONDS)
    with machines_of(tmp_path / "nodes", NODES[:count], apart=True) as machines:
        for machine in machines:
            set_up(machine, NODES[0], None if machine is machines[0] else machines[0])
            machine.configure(config, whole=True)
            machine.sh(PREPARE if machine is machines[0] else START)
        *others, lost = machines
        job = Training(plan, machines)
        try:
            job.start()
            job.allow(3)
            job.wait_for(3)
            job.allow(NO_LIMIT)
            followers = followers_of(others[0])
            job.ranks[-1].kill()
            for follower in followers:
                os.kill(follower, signal.SIGKILL)
            lost.lose()
            assert all(job.ended())
            lost_at = job.step
            # The rank of the lost node goes on at the first one. With one node left, no daemon could hold a replica.
            if count == 2:
                alone = {"durability": "step", "peers": [NODES[0]]}
                plan = replace(plan, config=CONFIG | {"paramserver": CONFIG["paramserver"] | alone})
            job.change(plan, [*others, others[0]])
            job.finish(lost_at + 2)
        finally:
            job.close()
    # The step that was under way had no commit that was confirmed to the ranks.
    assert all(result["resumed_step"] >= lost_at - 1 for result in job.results())
    job.plan = replace(plan, config=CONFIG)
    check_same_bits(job, tmp_path)
