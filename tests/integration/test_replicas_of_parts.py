"""A job on several daemons, each of which keeps the part of another one: the loss of one loses nothing."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.elastic_run import Part, launch

DAEMON = {"host_budget": "64MiB", "nvme_budget": "512MiB", "session_grace_seconds": 0.5}


def jobs_at(daemon: Daemon) -> dict[str, admin_pb.JobInfo]:
    with admin_of(daemon.address) as store:
        return {job.name: job for job in store.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_each_daemon_may_be_lost_in_turn_and_the_job_goes_on_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    """Two ranks lose the second daemon and go on with a third one; then the first is lost, and one rank goes on."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    with ExitStack() as daemons:
        first, second, third = (
            daemons.enter_context(Daemon(tmp_path / name / "state", DAEMON)) for name in ("a", "b", "c")
        )
        addresses = [daemon.address for daemon in (first, second, third)]
        section = {"replicas": 1, "replica": {"addresses": addresses}, "durability": "replicated"}
        part = Part(job="gpt2", until=3, addresses=tuple(addresses[:2]), config={"paramserver": section})
        begun, whole = launch([part, replace(part, job="whole", until=6, config={})], 2, tmp_path)
        assert jobs_at(second)["gpt2@replica-0"].committed_step == jobs_at(third)["gpt2@replica-1"].committed_step == 3
        # The holder of each part is the next daemon of the list, and each daemon shows the lag of its own part.
        assert [[one.holder for one in jobs_at(daemon)["gpt2"].replicas] for daemon in (first, second)] == [
            [second.address],
            [third.address],
        ]

        lose(second)
        (resumed,) = launch([replace(part, until=6, addresses=(first.address, third.address))], 2, tmp_path)
        assert resumed.resumed_step == 3
        assert_same(resumed.before, begun.after)
        assert_same(resumed.after, whole.after)
        assert begun.losses + resumed.losses == whole.losses

        # The replica of the first daemon's part has gone over to the new layout, although it had newer steps of the
        # former one than the layout begins with.
        lose(first)
        alone = replace(part, until=7, addresses=(third.address,), peers=(third.address,), config={})
        (last,) = launch([alone], 1, tmp_path)
        assert last.resumed_step == 6
        assert_same(last.before, resumed.after)


def lose(daemon: Daemon) -> None:
    daemon.kill()
    shutil.rmtree(daemon.state_dir)
