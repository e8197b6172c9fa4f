"""An operator's roll-back is the newest history: no replica, and no other daemon, brings back what it has given up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import admin_of, serving
from tests.integration.support.elastic_run import Part, job_info, launch, read_job, train_part
from tests.integration.support.equality import are_equal
from tests.integration.support.waiting import wait_until

# A job of one rank retains its newest step and the newest one of these.
SNAPSHOTS = "snapshot:2"
DAEMON = {"host_budget": "64MiB", "nvme_budget": "512MiB", "session_grace_seconds": 0.5}


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    """The addresses of three daemons."""
    with serving(tmp_path, ("a", "b", "c"), DAEMON) as daemons:
        yield [daemon.address for daemon in daemons]


def with_replicas(part: Part, addresses: Sequence[str], durability: str = "replicated") -> Part:
    section = {"replicas": 1, "replica": {"addresses": list(addresses)}, "durability": durability}
    return replace(part, config={"paramserver": section})


def roll_back(address: str, job: str, step: int) -> None:
    # The follower has a session for a moment longer than its trainer.
    wait_until(lambda: not job_info(address, job).sessions, seconds=30)
    with admin_of(address) as store:
        store.RollBackJob(admin_pb.RollBackJobRequest(job=job, step=step), timeout=30)


def test_a_replica_that_has_newer_steps_does_not_undo_a_roll_back(addresses: list[str], job: str) -> None:
    """The replica is rolled back as well, and afterwards it has the newest step of the job again."""
    own, holder, _ = addresses
    part = with_replicas(Part(job=job, until=3, addresses=(own,)), addresses[:2], SNAPSHOTS)
    train_part(part)
    assert job_info(holder, job).committed_step == 3
    roll_back(own, job, 2)

    resumed = train_part(replace(part, until=4))

    assert resumed.resumed_step == 2
    wait_until(lambda: job_info(holder, job).committed_step == 4, seconds=30)
    assert are_equal(read_job(job, [holder]), resumed.after)


def test_a_step_of_the_former_history_is_not_mixed_with_one_of_the_same_number(addresses: list[str], job: str) -> None:
    """Another daemon has step 3, too, and a start on a third one, which asks it first, reads the later step 3."""
    own, other, third = addresses
    part = Part(job=job, until=3, addresses=(own,), config={"paramserver": {"durability": SNAPSHOTS}})
    train_part(with_replicas(part, [own, other], SNAPSHOTS))
    roll_back(own, job, 2)
    # Without replicas, and with another clipping, so that the bits of this step 3 differ.
    later = train_part(replace(part, config={**part.config, "gradient_clipping": 0.01}))
    assert later.resumed_step == 2
    assert not are_equal(read_job(job, [other]), later.after)

    moved = train_part(replace(part, until=4, addresses=(third,), peers=(other, own)))

    assert moved.resumed_step == 3
    assert are_equal(moved.before, later.after)


def test_the_replicas_of_parts_do_not_undo_a_roll_back_of_all_parts(
    addresses: list[str], job: str, tmp_path: Path
) -> None:
    """Each of two daemons has the replica of the other one's part. Then one of them is lost without the roll-back."""
    first, second, _ = addresses
    part = with_replicas(Part(job=job, until=3, addresses=(first, second)), addresses[:2])
    launch([part], 2, tmp_path)
    for address in (first, second):
        roll_back(address, job, 2)

    (resumed,) = launch([replace(part, until=4)], 2, tmp_path)

    assert resumed.resumed_step == 2
    for part_number, holder in enumerate((second, first)):
        assert job_info(holder, f"{job}@replica-{part_number}").committed_step == 4
