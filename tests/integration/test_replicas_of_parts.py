"""A job on several daemons, each of which keeps the part of another one: the loss of one loses nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, admin_of, serving
from tests.integration.support.elastic_run import Part, launch
from tests.integration.support.equality import assert_equal

DAEMON = {"host_budget": "64MiB", "nvme_budget": "512MiB", "session_grace_seconds": 0.5}


def jobs_at(daemon: Daemon) -> dict[str, admin_pb.JobInfo]:
    with admin_of(daemon.address) as store:
        return {job.name: job for job in store.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs}


def test_each_daemon_may_be_lost_in_turn_and_the_job_goes_on_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    """Two ranks lose the second daemon and go on with a third one; then the first is lost, and one rank goes on."""
    with serving(tmp_path, ("a", "b", "c"), DAEMON) as daemons:
        first, second, third = daemons
        addresses = [daemon.address for daemon in daemons]
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
        assert_equal(resumed.before, begun.after)
        assert_equal(resumed.after, whole.after)
        assert begun.losses + resumed.losses == whole.losses

        # The replica of the first daemon's part has gone over to the new layout, although it had newer steps of the
        # former one than the layout begins with.
        lose(first)
        alone = replace(part, until=7, addresses=(third.address,), peers=(third.address,), config={})
        (last,) = launch([alone], 1, tmp_path)
        assert last.resumed_step == 6
        assert_equal(last.before, resumed.after)


def lose(daemon: Daemon) -> None:
    daemon.kill()
    shutil.rmtree(daemon.state_dir)
