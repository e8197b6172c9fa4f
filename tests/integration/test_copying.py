"""Steps are copied between daemons, backed up and restored: bit for bit, whole or not at all, and only what changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import DType, Kind, TierName
from tests.integration.support.daemon import MIB, Daemon, Stores, admin_of, serving, tiers
from tests.integration.support.forked import Forked
from tests.integration.support.model_runs import config_of
from tests.integration.support.store_client import Clients
from tests.integration.support.training import Run, assert_bit_equal, launch
from tests.integration.support.waiting import wait_until
from tests.special_files import replace_with
from tests.unit.storage.builders import Layout
from trainer_client import StoreClientSync
from trainer_client.client.store_client.connection import Connection
from trainer_client.client.transport.credentials import NO_CREDENTIALS
from trainer_client.copying.daemon_step import DaemonStep
from trainer_client.copying.description import CopyProgress
from trainer_client.copying.put_step import CopyResult, PutRun, copy_step
from trainer_client.errors import CopyError, StoreBudgetError, StoreUnavailableError

CONFIG = {"host_budget": "64MiB", "nvme_budget": "512MiB", "session_grace_seconds": 0.5}
# Sixteen shards of 256 KiB, and small tensors that share a group, with elements between them that no tensor has.
SHARD_BYTES = 256 << 10
LARGE = (16, SHARD_BYTES // 4)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with serving(tmp_path_factory.mktemp("stores"), ("first", "second"), CONFIG) as daemons:
        yield Stores(*daemons)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    small = {f"small.{i}": torch.randn(5, i + 1, generator=generator) for i in range(20)}
    return {"large": torch.randn(LARGE, generator=generator), **small}


def put(address: str, job: str, *steps: dict[str, torch.Tensor]) -> int:
    """Commit a step for each set of tensors, and return the number of the last one."""
    with (
        StoreClientSync.connect(address) as client,
        client.open(job, tensors(), shard_bytes=SHARD_BYTES) as writer,
    ):
        for values in steps:
            writer.put(values)
            writer.commit()
        assert writer.step is not None
        return writer.step


def assert_step(address: str, job: str, step: int, values: dict[str, torch.Tensor]) -> None:
    with StoreClientSync.connect(address) as client, client.read(job) as reader:
        assert reader.step == step
        assert [name for name, value in values.items() if not torch.equal(reader.get(name), value)] == []


def admin(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def admin_json(*arguments: str) -> Any:
    return json.loads(admin(*arguments, "--json"))


def copy(
    origin: Daemon,
    target: Daemon,
    job: str,
    *,
    prefer_streams: bool = False,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
    **which: Any,
) -> CopyResult:
    source, sink = (
        Connection(daemon.address, "test", NO_CREDENTIALS, prefer_streams=prefer_streams) for daemon in (origin, target)
    )
    with ExitStack() as closing:
        closing.callback(source.close)
        closing.callback(sink.close)
        return copy_step(source, sink, job, on_progress=on_progress, **which)


def used(daemon: Daemon) -> list[tuple[int, int]]:
    """Return what the daemon holds now: used and leased bytes of each tier."""
    return [(tier.used_bytes, tier.leased_bytes) for tier in tiers(daemon.address)]


def jobs(daemon: Daemon) -> list[str]:
    with admin_of(daemon.address) as store:
        return [job.name for job in store.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs]


# --- training


def test_a_run_goes_on_from_a_copy_and_from_a_restored_backup_with_the_bits_of_an_uninterrupted_one(
    stores: Stores, tmp_path: Path, job: str
) -> None:
    def run(address: str, job: str, steps: int) -> Run:
        config = config_of(address, job, "nvme", durability="snapshot:2")
        return Run(
            steps=steps,
            clipping=0.5,
            precision="bf16",
            schedule=True,
            two_groups=True,
            with_masters=True,
            config=config,
        )

    first, second, backup = stores.first, stores.second, str(tmp_path / "backup")
    whole, begun = launch([run(first.address, f"{job}-whole", 4), run(first.address, job, 2)], 2, tmp_path)
    assert begun.losses == whole.losses[:2]
    admin("backup", job, backup, "--address", first.address)
    admin("copy", job, first.address, second.address)
    described = [admin_of(daemon.address) for daemon in (first, second)]
    durable = []
    for one in described:
        with one as store:
            (found,) = [j for j in store.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs if j.name == job]
            durable.append((found.world_size, found.durability, found.committed_step, found.parameters))
    assert durable[0] == durable[1]
    # The job of the first store is deleted, so that the restore goes into an empty place.
    admin("delete-job", job, "--yes", "--address", first.address)
    admin("restore", job, backup, "--address", first.address)

    copied, restored = launch([run(daemon.address, job, 4) for daemon in (second, first)], 2, tmp_path)

    expected = replace(whole, losses=whole.losses[2:], norms=whole.norms[2:])
    for resumed in (copied, restored):
        assert resumed.resumed_step == 2
        assert_bit_equal(resumed, expected)


LAYOUTS = {
    "nvme": Layout(precision=DType.BFLOAT16),
    "host": Layout(precision=DType.BFLOAT16, weights=TierName.HOST, moments=TierName.HOST),
    "snapshots": Layout(moments=TierName.HOST, every_steps=3),
    "memory": Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copied_job_trains_on_with_torchs_bits_wherever_it_keeps_them(stores: Stores, job: str, name: str) -> None:
    layout = replace(LAYOUTS[name], name=f"{job}-{name}")
    with Clients(stores.first.address) as clients:
        # Training goes on between the copies. At step 0 the moments were never written.
        rank = clients.rank(layout).begin()
        assert copy(stores.first, stores.second, layout.name).sent_slabs == len(layout.groups) * (len(layout.kinds) - 2)
        rank.train(1, 2)
        copy(stores.first, stores.second, layout.name)
    with Clients(stores.second.address) as clients:
        rank = clients.rank(layout)
        assert rank.resume() == 2
        rank.assert_at(2)
        rank.train(3, 4)
        rank.assert_at(4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_run_puts_one_step_after_another_wherever_the_job_keeps_them(stores: Stores, job: str, name: str) -> None:
    layout = replace(LAYOUTS[name], name=f"{job}-{name}")
    connections = [
        Connection(one.address, "test", NO_CREDENTIALS, prefer_streams=False) for one in (stores.first, stores.second)
    ]
    with ExitStack() as closing, Clients(stores.first.address) as clients:
        for connection in connections:
            closing.callback(connection.close)
        origin, target = connections
        rank = clients.rank(layout).begin()
        run = closing.enter_context(PutRun(target))
        for first, last in ((1, 1), (2, 4), (5, 5)):
            rank.train(first, last)
            with DaemonStep(origin, layout.name) as source:
                assert run.takes(source.description)
                assert run.put(source).step == last
            # The job is the run's own between two steps.
            assert "attached; stop its trainers first" in admin(
                "delete-job", layout.name, "--yes", "--address", stores.second.address, code=1
            )
    with Clients(stores.second.address) as clients:
        rank = clients.rank(layout)
        assert rank.resume() == 5
        rank.assert_at(5)
        rank.train(6, 7)
        rank.assert_at(7)


def test_the_part_of_one_node_is_copied_and_keeps_a_step_to_go_back_to(
    stores: Stores, tmp_path: Path, job: str
) -> None:
    layout = Layout(name=job)
    with Clients(stores.first.address) as clients:
        rank = clients.rank(layout, rank=1, ranks=2)
        rank.open(attached_ranks=1)
        rank.register()
        rank.stage_all()
        rank.commit(0)
        # The ranks have found out that both nodes have the step. Without this it could be of this node alone.
        rank.call("SettleStep", step=0)
        # The first step comes from a backup. Its moments were never written.
        admin("backup", job, str(tmp_path / "backup"), "--address", stores.first.address)
        admin("restore", job, str(tmp_path / "backup"), "--address", stores.second.address)
        rank.train(1, 3)
        rank.call("SettleStep", step=3)
        copy(stores.first, stores.second, job)
        rank.train(4, 4)
        rank.call("SettleStep", step=4)
        copy(stores.first, stores.second, job)
    # The node of rank 0 may still be at the step of the copy before.
    steps = admin_json("versions", job, "--address", stores.second.address)["steps"]
    assert [(step["step"], step["world_size"]) for step in steps] == [(3, 2), (4, 2)]
    with Clients(stores.second.address) as clients:
        rank = clients.rank(layout, rank=1, ranks=2)
        committed = rank.open(pb.RESUME_POLICY_MUST, attached_ranks=1)
        assert committed[-1].client_state == b"1:4"
        rank.register()
        rank.assert_at(4)


def test_a_new_layout_replaces_the_one_that_the_target_has(stores: Stores, job: str) -> None:
    layout = Layout(name=job)
    with Clients(stores.first.address) as clients:
        rank = clients.rank(layout)
        rank.open(layout="one")
        rank.register()
        rank.stage_all()
        rank.commit(0)
    copy(stores.first, stores.second, job)
    with Clients(stores.first.address) as clients:
        rank = clients.rank(layout, run_id="two")
        rank.open(layout="two")
        rank.call("BeginLayout", first_step=1)
        rank.register()
        for group in rank.groups:
            lease = rank.acquire(group, Kind.PARAM, pb.LEASE_MODE_WRITE, step=1)
            rank.tensor(lease, Kind.PARAM).fill_(2.5)
            rank.release(lease, publish=True)
        rank.commit(1)
    copy(stores.first, stores.second, job)
    with StoreClientSync.connect(stores.second.address) as client:
        (found,) = [one for one in client.list_jobs() if one.name == job]
        assert [(one.name, one.steps) for one in found.layouts] == [("two", (1,))]
        with client.read(job) as reader:
            assert all((reader.get(tensor.fqn) == 2.5).all() for tensor in reader.tensors())


# --- copies


@pytest.mark.parametrize("prefer_streams", [False, True])
def test_a_second_copy_sends_only_what_has_changed(stores: Stores, job: str, prefer_streams: bool) -> None:
    job = f"{job}-{prefer_streams}"
    values = tensors()
    put(stores.first.address, job, values)
    first = copy(stores.first, stores.second, job, prefer_streams=prefer_streams)
    assert (first.sent_bytes, first.same_bytes) == (first.total_bytes, 0)
    again = copy(stores.first, stores.second, job, prefer_streams=prefer_streams)
    assert (again.sent_bytes, again.same_bytes) == (0, again.total_bytes)

    # The versions of the unchanged shards are older in the first store than in the second one, which got them later.
    changed = {"small.3": torch.full((5, 4), 7.0)}
    put(stores.first.address, job, changed, changed, {"small.7": values["small.7"] * 2})
    values |= changed | {"small.7": values["small.7"] * 2}
    third = copy(stores.first, stores.second, job, prefer_streams=prefer_streams)
    assert third.sent_slabs == 1
    assert third.sent_bytes == sum(value.nbytes for name, value in values.items() if name != "large")
    assert_step(stores.second.address, job, 3, values)


def test_a_kept_step_is_copied_and_the_copy_begins_with_its_number(stores: Stores, job: str) -> None:
    put(stores.first.address, job, tensors(0), tensors(1))
    admin("pin", job, "one", "--address", stores.first.address)
    put(stores.first.address, job, tensors(2))
    copy(stores.first, stores.second, job, kept="one")
    assert_step(stores.second.address, job, 1, tensors(1))
    copy(stores.first, stores.second, job)
    assert_step(stores.second.address, job, 2, tensors(2))
    admin("unpin", job, "one", "--yes", "--address", stores.first.address)


def test_a_copy_never_changes_what_the_target_has_committed(stores: Stores, job: str) -> None:
    put(stores.first.address, job, tensors(0))
    put(stores.second.address, job, tensors(1))
    with pytest.raises(CopyError, match="another step 0"):
        copy(stores.first, stores.second, job)
    put(stores.second.address, job, tensors(2))
    with pytest.raises(CopyError, match="step 0 is older"):
        copy(stores.first, stores.second, job)
    with StoreClientSync.connect(stores.second.address) as client, client.open(job, tensors(), shard_bytes=SHARD_BYTES):
        put(stores.first.address, job, tensors(3), tensors(4))
        error = admin("copy", job, stores.first.address, stores.second.address, code=1)
        assert "is in use here" in error
    assert_step(stores.second.address, job, 1, tensors(2))
    # A step that was made again after a roll-back has another number only by chance; its bytes are sent.
    copy(stores.first, stores.second, job)
    assert_step(stores.second.address, job, 2, tensors(4))


def leave_half_a_copy(stores: Stores, directory: Path, job: str) -> None:
    """Kill a process half-way through a copy."""
    waits = directory / "waits"
    arguments = [stores.first.address, stores.second.address, job, str(waits)]
    half = Forked("tests.integration.support.half_a_copy", arguments, environment={}, log=directory / "log")
    try:
        wait_until(lambda: waits.exists() or half.poll() is not None)
        assert half.poll() is None, (directory / "log").read_text()
    finally:
        half.kill()
        half.wait()
    waits.unlink()


@pytest.mark.parametrize("newest", [None, 0, 1])
def test_a_killed_copy_goes_on_where_it_was(stores: Stores, tmp_path: Path, job: str, newest: int | None) -> None:
    """The job is new in the target, at its first step or at a later one, or the target has an older step of it."""
    job = f"{job}-{newest}"
    before = used(stores.second)
    put(stores.first.address, job, tensors(0))
    if newest == 0:
        copy(stores.first, stores.second, job)
    step = 0 if newest is None else put(stores.first.address, job, tensors(1))

    leave_half_a_copy(stores, tmp_path, job)
    with StoreClientSync.connect(stores.second.address) as client:
        (found,) = [one.step for one in client.list_jobs() if one.name == job]
    assert found == (0 if newest == 0 else None)
    resumed = copy(stores.first, stores.second, job)
    assert 0 < resumed.sent_bytes <= resumed.total_bytes * 3 / 4
    assert resumed.resumed_bytes == resumed.total_bytes - resumed.sent_bytes
    assert_step(stores.second.address, job, step, tensors(step))

    audited = (stores.second.state_dir / "audit.jsonl").read_text().splitlines()
    begun = [line for line in map(json.loads, audited) if line["verb"] == "BeginCopy"]
    assert [line["arguments"]["job"] for line in begun[-2:]] == [job, job]
    assert begun[-1]["arguments"]["source"] == stores.first.address
    admin("delete-job", job, "--yes", "--address", stores.second.address)
    wait_until(lambda: used(stores.second) == before)


def test_an_interrupted_copy_goes_on_where_it_was(stores: Stores, job: str) -> None:
    put(stores.first.address, job, tensors(0))

    def interrupt(progress: CopyProgress) -> None:
        if 2 * progress.done_bytes >= progress.total_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(stores.first, stores.second, job, on_progress=interrupt)
    assert copy(stores.first, stores.second, job).resumed_bytes > 0
    assert_step(stores.second.address, job, 0, tensors(0))


def test_another_run_discards_an_unfinished_copy(stores: Stores, tmp_path: Path, job: str) -> None:
    put(stores.first.address, job, tensors())
    leave_half_a_copy(stores, tmp_path, job)

    def is_left() -> bool:
        events = admin_json("events", "--kind", "job", "--address", stores.second.address)["events"]
        return any(event["subject"] == job and "an unfinished copy stays" in event["text"] for event in events)

    # The sessions of the killed process hold the job until their grace time is over.
    wait_until(is_left)
    put(stores.second.address, job, tensors(5))
    assert_step(stores.second.address, job, 0, tensors(5))


def test_a_target_that_is_killed_half_way_has_nothing_of_the_step(stores: Stores, tmp_path: Path, job: str) -> None:
    put(stores.first.address, job, tensors(0))
    with ExitStack() as daemons:
        target = daemons.enter_context(Daemon(tmp_path / "c", CONFIG))

        def kill(progress: CopyProgress) -> None:
            if 2 * progress.done_bytes >= progress.total_bytes:
                target.kill()

        with pytest.raises(StoreUnavailableError):
            copy(stores.first, target, job, on_progress=kill, restart_seconds=0.5)
        target = daemons.enter_context(Daemon(tmp_path / "c", CONFIG))
        assert jobs(target) == []
        copy(stores.first, target, job)
        put(stores.first.address, job, tensors(1))
        with pytest.raises(StoreUnavailableError):
            copy(stores.first, target, job, on_progress=kill, restart_seconds=0.5)
        target = daemons.enter_context(Daemon(tmp_path / "c", CONFIG))
        assert_step(target.address, job, 0, tensors(0))
        copy(stores.first, target, job)
        assert_step(target.address, job, 1, tensors(1))


@pytest.mark.parametrize("newest", [None, 0])
def test_a_copy_begins_anew_after_a_restart_of_its_target_and_leaks_nothing(
    stores: Stores, tmp_path: Path, job: str, newest: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The job is new in the target, or the target has an older step of it."""
    job = f"{job}-{newest}"
    put(stores.first.address, job, tensors(0))
    with ExitStack() as daemons:
        running = [daemons.enter_context(Daemon(tmp_path / "c", CONFIG))]
        empty = used(running[0])
        if newest == 0:
            copy(stores.first, running[0], job)
            put(stores.first.address, job, tensors(1))

        def restart(progress: CopyProgress) -> None:
            if 2 * progress.done_bytes >= progress.total_bytes and len(running) == 1:
                running[0].kill()
                running.append(daemons.enter_context(Daemon(tmp_path / "c", CONFIG)))

        copied = copy(stores.first, running[0], job, on_progress=restart)
        assert (len(running), copied.resumed_bytes) == (2, 0)
        assert "was restarted" in caplog.text and "the copy begins anew" in caplog.text
        assert_step(running[1].address, job, copied.step, tensors(copied.step))
        admin("accounts", "--address", running[1].address)
        admin("delete-job", job, "--yes", "--address", running[1].address)
        wait_until(lambda: used(running[1]) == empty)


def test_a_killed_copy_whose_target_is_restarted_leaves_nothing_and_is_made_anew(
    stores: Stores, tmp_path: Path, job: str
) -> None:
    put(stores.first.address, job, tensors(0))
    with ExitStack() as daemons:
        target = daemons.enter_context(Daemon(tmp_path / "c", CONFIG))
        empty = used(target)
        leave_half_a_copy(Stores(stores.first, target), tmp_path, job)
        target.kill()
        target = daemons.enter_context(Daemon(tmp_path / "c", CONFIG))
        assert (jobs(target), used(target)) == ([], empty)
        admin("accounts", "--address", target.address)
        assert copy(stores.first, target, job).resumed_bytes == 0
        assert_step(target.address, job, 0, tensors(0))


def test_a_copy_goes_on_after_a_restart_of_the_daemon_that_is_read(stores: Stores, tmp_path: Path, job: str) -> None:
    with ExitStack() as daemons:
        running = [daemons.enter_context(Daemon(tmp_path / "c", CONFIG))]
        put(running[0].address, job, tensors(0))

        def restart(progress: CopyProgress) -> None:
            if 2 * progress.done_bytes >= progress.total_bytes and len(running) == 1:
                running[0].kill()
                running.append(daemons.enter_context(Daemon(tmp_path / "c", CONFIG)))

        copied = copy(running[0], stores.second, job, on_progress=restart)
    assert (len(running), copied.sent_bytes) == (2, copied.total_bytes)
    assert_step(stores.second.address, job, 0, tensors(0))


@pytest.mark.parametrize("steps", [1, 2])
def test_nothing_is_left_in_a_target_that_has_no_room(stores: Stores, tmp_path: Path, job: str, steps: int) -> None:
    job = f"{job}-{steps}"
    put(stores.first.address, job, *map(tensors, range(steps)))
    with Daemon(tmp_path / "c", {"nvme_budget": 2 * MIB}) as target:
        before = used(target)
        with pytest.raises(StoreBudgetError, match="nvme_budget"):
            copy(stores.first, target, job)
        wait_until(lambda: (jobs(target), used(target)) == ([], before))


# --- backups


@dataclass(frozen=True, slots=True)
class Backup:
    job: str
    directory: Path

    def copy_to(self, directory: Path) -> Path:
        return shutil.copytree(self.directory, directory / "copy")


@pytest.fixture(scope="module")
def backed_up(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> Backup:
    """A backup with two steps of a job, of which the small tensors are different."""
    job, directory, values = "backed-up", tmp_path_factory.mktemp("backups") / "backup", tensors(0)
    put(stores.first.address, job, values)
    first = admin_json("backup", job, str(directory), "--address", stores.first.address)
    assert first["written_bytes"] == first["total_bytes"] == sum(value.nbytes for value in values.values())
    assert first["written_slabs"] == 17
    put(stores.first.address, job, {"small.0": values["small.0"] + 1})
    second = admin_json("backup", job, str(directory), "--address", stores.first.address)
    assert (second["written_slabs"], second["steps"]) == (1, [0, 1])
    return Backup(job, directory)


def shard_files(backup: Path) -> list[Path]:
    return sorted((backup / "shards").iterdir(), key=lambda path: path.stat().st_size)


def test_a_second_backup_writes_only_changed_shards_and_each_step_can_be_restored(
    stores: Stores, backed_up: Backup, tmp_path: Path
) -> None:
    job, backup = backed_up.job, backed_up.copy_to(tmp_path)
    # Two client states, seventeen slabs, and one of them once more.
    assert len(shard_files(backup)) == 20
    admin("restore", job, str(backup), "--step", "0", "--address", stores.second.address)
    assert_step(stores.second.address, job, 0, tensors(0))
    restored = admin_json("restore", job, str(backup), "--address", stores.second.address)
    assert restored["sent_slabs"] == 1
    newest = tensors(0) | {"small.0": tensors(0)["small.0"] + 1}
    assert_step(stores.second.address, job, 1, newest)
    admin("delete-job", job, "--yes", "--address", stores.second.address)
    # There is one backup of the same commit, and with --keep-last the files of older ones go.
    again = admin_json("backup", job, str(backup), "--keep-last", "1", "--address", stores.first.address)
    assert (again["written_bytes"], again["steps"]) == (0, [1])
    assert len(shard_files(backup)) == 18


def test_a_step_that_was_made_again_is_backed_up_anew(stores: Stores, tmp_path: Path, job: str) -> None:
    backup = str(tmp_path / "backup")
    for change in (1, 2):
        put(stores.first.address, job, tensors(0), {"small.0": tensors(0)["small.0"] + change})
        result = admin_json("backup", job, backup, "--address", stores.first.address)
        admin("delete-job", job, "--yes", "--address", stores.first.address)
    # The versions have the numbers of the former ones. The large shards have the same bytes, and the small ones others.
    assert (result["written_slabs"], result["steps"]) == (1, [1, 1])
    admin("restore", job, backup, "--address", stores.second.address)
    assert_step(stores.second.address, job, 1, tensors(0) | {"small.0": tensors(0)["small.0"] + 2})


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced_by_a_pipe(path: Path) -> None:
    replace_with(path, "pipe")


def flip_in_a_manifest(backup: Path) -> None:
    flip_a_byte(max((backup / "steps").iterdir()))


def cut_a_manifest(backup: Path) -> None:
    newest = max((backup / "steps").iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda backup: flip_a_byte(shard_files(backup)[-1]), "is damaged: the bytes of"),
        (lambda backup: shard_files(backup)[-1].write_bytes(b"short"), "has 5 bytes in place of 262144"),
        (lambda backup: shard_files(backup)[-1].unlink(), "is missing"),
        (flip_in_a_manifest, "is damaged or cut off"),
        (cut_a_manifest, "is damaged or cut off"),
        (lambda backup: shutil.rmtree(backup / "steps"), "does not have a complete backup"),
        (lambda backup: (backup / "backup.json").unlink(), "is no backup"),
        (lambda backup: (backup / "backup.json").write_text("[1"), "is no backup, or a damaged one"),
        (lambda backup: (backup / "backup.json").write_text('{"format": "x", "version": 9, "job": "j"}'), "of format"),
    ],
)
def test_a_damaged_or_foreign_backup_is_refused_and_changes_nothing(
    stores: Stores, backed_up: Backup, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    backup = backed_up.copy_to(tmp_path)
    before, known = used(stores.second), jobs(stores.second)
    harm(backup)
    output = admin("restore", backed_up.job, str(backup), "--address", stores.second.address, code=1)
    assert message in " ".join(output.split())
    wait_until(lambda: (used(stores.second), jobs(stores.second)) == (before, known))


def test_a_backup_beside_a_damaged_one_is_refused_before_anything_is_written(
    stores: Stores, backed_up: Backup, tmp_path: Path
) -> None:
    job, backup = backed_up.job, backed_up.copy_to(tmp_path)
    flip_a_byte(min((backup / "steps").iterdir()))
    before = sorted(backup.rglob("*"))
    for keep in ((), ("--keep-last", "2")):
        error = admin("backup", job, str(backup), *keep, "--address", stores.first.address, code=1)
        assert "is damaged or cut off" in " ".join(error.split())
        assert sorted(backup.rglob("*")) == before
    # A damaged backup that would not be kept anyway does not matter.
    made = admin_json("backup", job, str(backup), "--keep-last", "1", "--address", stores.first.address)
    assert made["steps"] == [1]


@pytest.mark.parametrize(
    "harm",
    [flip_a_byte, lambda path: path.write_bytes(b"short"), lambda path: path.unlink(), replaced_by_a_pipe],
    ids=["flipped", "cut", "missing", "a pipe"],
)
def test_a_damaged_file_is_not_taken_over_and_the_next_backup_makes_all_of_them_whole(
    stores: Stores, backed_up: Backup, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    job, backup = backed_up.job, backed_up.copy_to(tmp_path)
    harm(shard_files(backup)[-1])
    for number in ("0", "1"):
        admin("restore", job, str(backup), "--step", number, "--address", stores.second.address, code=1)
    made = admin_json("backup", job, str(backup), "--address", stores.first.address)
    assert (made["written_slabs"], made["repaired_slabs"]) == (1, 1)
    again = admin_json("backup", job, str(backup), "--address", stores.first.address)
    assert (again["written_slabs"], again["repaired_slabs"]) == (0, 0)
    for step, values in enumerate((tensors(0), tensors(0) | {"small.0": tensors(0)["small.0"] + 1})):
        admin("restore", job, str(backup), "--step", str(step), "--address", stores.second.address)
        assert_step(stores.second.address, job, step, values)
    admin("delete-job", job, "--yes", "--address", stores.second.address)


def test_a_backup_is_of_one_job_and_only_in_its_own_directory(
    stores: Stores, backed_up: Backup, tmp_path: Path
) -> None:
    backup = backed_up.copy_to(tmp_path)
    put(stores.first.address, "other", tensors(3))
    error = admin("backup", "other", str(backup), "--address", stores.first.address, code=1)
    assert "is a backup of job" in error
    assert "is a backup of job" in admin("restore", "other", str(backup), "--address", stores.second.address, code=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    error = admin("backup", "other", str(tmp_path / "mine"), "--address", stores.first.address, code=1)
    assert "is no backup" in error
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_backup_behind_a_url_is_restored(stores: Stores, job: str) -> None:
    put(stores.first.address, job, tensors(4))
    url = f"memory://backups/{job}"
    admin("backup", job, url, "--address", stores.first.address)
    written = admin_json("backup", job, url, "--address", stores.first.address)
    assert written["written_bytes"] == 0
    admin("restore", job, url, "--address", stores.second.address)
    assert_step(stores.second.address, job, 0, tensors(4))
    fsspec.filesystem("memory").rm("/backups", recursive=True)


# --- the other verbs


def test_export_and_import_are_those_of_paramserver(stores: Stores, tmp_path: Path, job: str) -> None:
    put(stores.first.address, job, tensors(0))
    destination = str(tmp_path / "exported")
    admin("export", "--job", job, "--address", stores.first.address, destination)
    admin("import", "--job", f"{job}-imported", "--address", stores.second.address, destination)
    with StoreClientSync.connect(stores.second.address) as client, client.read(f"{job}-imported") as reader:
        assert torch.equal(reader.get("large"), tensors(0)["large"])
