"""A token that allows many jobs has one quota for all of them. A refusal names the token, a restarted daemon counts
anew, and a deleted job makes room. The token's holder may delete jobs where the token says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.cli import app as daemon_app
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind
from tests.integration.support.daemon import CHANNEL_OPTIONS, Daemon
from tests.integration.support.store_client import CALL_SECONDS, Client, Rank, refused
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.credentials import Credentials

CODE = grpc.StatusCode
# These elements are fp32, so a slab has 1 MiB. A job has three slabs, and needs room for each twice: committed and
# pending.
NUMEL = 256 << 10
TINY = 16


class Store:
    """A daemon with tokens. `carol` may delete her jobs and `dave` may not. Some of Dave's jobs are Carol's, too."""

    def __init__(self, directory: Path, quotas: list[dict[str, Any]]) -> None:
        self.token_file = directory / "tokens.toml"
        self.tokens = {
            "operator": add_token(self.token_file, "operator", Role.ADMIN),
            "carol": add_token(self.token_file, "carol", Role.JOB, ["team/*"], delete=True),
            "dave": add_token(self.token_file, "dave", Role.JOB, ["team/dave-*", "dave"]),
        }
        self._state_dir = directory / "state"
        self._config = {
            "token_file": str(self.token_file),
            "quotas": {"token": quotas},
            "admission_timeout_seconds": 1.0,
            "host_budget": "64MiB",
        }
        self.daemon = Daemon(self._state_dir, self._config)

    def restart(self) -> None:
        """Stop the daemon in order and start it again."""
        assert self.daemon.stop() == 0
        assert "Traceback" not in self.daemon.log
        self.daemon = Daemon(self._state_dir, self._config)

    def channel(self, token: str) -> grpc.Channel:
        return Credentials(token=self.tokens[token]).connect(self.daemon.address, CHANNEL_OPTIONS)

    def rank(self, token: str, job: str, numel: int = TINY, run_id: str = "run") -> Rank:
        layout = Layout(name=job, numels=(numel,), groups=("a",))
        return Rank(self.daemon.address, layout, run_id=run_id, channel=self.channel(token))

    @contextlib.contextmanager
    def job(self, token: str, job: str, numel: int = TINY) -> Iterator[Rank]:
        """Open a job and commit its first step, and close the session at the end of the context."""
        rank = self.rank(token, job, numel)
        try:
            yield rank.begin()
        finally:
            rank.close()

    def delete(self, token: str, job: str) -> tuple[int, str]:
        """Run `paramserver-admin delete-job`, and return its exit status and output."""
        environment = {"PARAMSERVER_TOKEN_FILE": str(self.token_file.with_name("token"))}
        self.token_file.with_name("token").write_text(self.tokens[token])
        arguments = ["delete-job", "--address", self.daemon.address, "--yes", job]
        ended = CliRunner().invoke(app, arguments, env=environment)
        return ended.exit_code, ended.output


@pytest.fixture
def quotas() -> list[dict[str, Any]]:
    return [{"name": "carol", "jobs": 3}]


@pytest.fixture
def store(tmp_path: Path, quotas: list[dict[str, Any]]) -> Iterator[Store]:
    store = Store(tmp_path, quotas)
    with contextlib.ExitStack() as cleanup:
        # The lambda reads `store.daemon` when the test ends, because a restart replaces the daemon.
        cleanup.callback(lambda: store.daemon.kill())  # noqa: PLW0108
        yield store
        assert store.daemon.stop() == 0
        assert "Traceback" not in store.daemon.log
        assert not [secret for secret in store.tokens.values() if secret in store.daemon.log]


def make(store: Store, token: str, job: str, numel: int = TINY) -> None:
    """Train a job to step 1 and close its session."""
    with store.job(token, job, numel) as rank:
        rank.train(1, 1)


USED_UP = "the quota of token carol, jobs = 3, is used up: there are 3 jobs that the token allows"


def test_jobs_of_a_token_are_counted_whoever_made_them_and_after_a_restart(store: Store) -> None:
    make(store, "carol", "team/1")
    make(store, "dave", "team/dave-1")
    make(store, "operator", "team/2")
    make(store, "dave", "dave")
    for _ in range(2):
        with refused(CODE.RESOURCE_EXHAUSTED, USED_UP, "delete-job"):
            make(store, "carol", "team/3")
        # Carol may open a job that exists. The job "dave" does not count, because her token does not allow it.
        # Operators have no quota.
        late = store.rank("carol", "team/1", run_id="again")
        assert late.resume() == 1
        late.close()
        store.restart()
    assert store.delete("carol", "team/1")[0] == 0
    make(store, "carol", "team/3")
    with refused(CODE.RESOURCE_EXHAUSTED, USED_UP):
        make(store, "carol", "team/4")
    make(store, "operator", "team/5")


def test_jobs_that_are_opened_at_once_do_not_slip_past_the_quota(store: Store) -> None:
    ranks = [store.rank("carol", f"team/{number}") for number in range(12)]
    ready = threading.Barrier(len(ranks))

    def open_it(rank: Rank) -> bool:
        ready.wait()
        try:
            rank.open()
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call) and error.code() is CODE.RESOURCE_EXHAUSTED
            return False
        return True

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert sum(pool.map(open_it, ranks)) == 3
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("quotas", [[{"name": "carol", "nvme_bytes": "10MiB"}]])
def test_bytes_on_nvme_are_counted_over_all_jobs_of_a_token(store: Store) -> None:
    make(store, "carol", "team/1", NUMEL)
    make(store, "dave", "team/dave-1", NUMEL)
    store.restart()
    third = store.rank("carol", "team/3", NUMEL)
    third.open()
    with refused(
        CODE.RESOURCE_EXHAUSTED,
        "the quota of token carol, nvme_bytes = 10.0 MiB, is too small: the steps of its 3 jobs need 12.0 MiB",
    ):
        third.register()
    # A step that a reader holds counts, although its job is deleted.
    reader = Client(store.daemon.address, channel=store.channel("carol"))
    reader_id = reader.call("OpenReader", job="team/1").reader_id
    assert store.delete("carol", "team/1")[0] == 0
    with refused(CODE.RESOURCE_EXHAUSTED, "the steps of its 2 jobs need 12.0 MiB"):
        third.register()
    reader.call("CloseReader", reader_id=reader_id)
    third.register()
    third.stage_all()
    third.commit(0)
    third.train(1, 2)
    third.assert_at(2)
    third.close()
    reader.close()
    # Tokens without such a quota have no limit.
    make(store, "dave", "dave", NUMEL)


@pytest.mark.parametrize("quotas", [[{"name": "c*", "host_bytes": "5MiB"}]])
def test_host_memory_is_counted_over_all_jobs_of_a_token(store: Store) -> None:
    kinds = (Kind.PARAM, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    with store.job("carol", "team/1", NUMEL) as first, store.job("carol", "team/2", NUMEL) as second:
        leases = [first.acquire("a", kind, pb.LEASE_MODE_READ) for kind in kinds]
        held = [second.acquire("a", kind, pb.LEASE_MODE_READ) for kind in kinds[:2]]
        with refused(
            CODE.RESOURCE_EXHAUSTED,
            "the quota of token carol, host_bytes = 5.0 MiB, has no room for 1.0 MiB: 0 B are placed on the host, "
            "5.0 MiB are leased",
        ):
            second.acquire("a", kinds[2], pb.LEASE_MODE_READ)
        # A lease that is returned in one job makes room in the other job.
        giving_back = threading.Timer(0.2, first.release, [leases.pop()])
        giving_back.start()
        held.append(second.acquire("a", kinds[2], pb.LEASE_MODE_READ))
        giving_back.join()
        third = store.rank("carol", "team/3", NUMEL)
        third.open()
        with refused(CODE.RESOURCE_EXHAUSTED, "host_bytes = 5.0 MiB, is too small: steps of its 3 jobs need 6.0 MiB"):
            third.register()
        third.close()
        for lease in leases:
            first.release(lease)
        for lease in held:
            second.release(lease)
        first.train(1, 2)
        first.assert_at(2)


@pytest.mark.parametrize("quotas", [[{"name": "carol", "sessions": 2, "readers": 1}, {"sessions": 1}]])
def test_sessions_and_readers_of_a_token_are_counted(store: Store) -> None:
    make(store, "operator", "team/1")
    make(store, "operator", "team/2")
    first, second = (Client(store.daemon.address, channel=store.channel("carol")) for _ in range(2))
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of token carol, sessions = 2, is used up: 2 sessions are open"):
        Client(store.daemon.address, channel=store.channel("carol"))
    first.call("OpenReader", job="team/1")
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of token carol, readers = 1, is used up: 1 readers are open"):
        second.call("OpenReader", job="team/2")
    first.close()
    second.call("OpenReader", job="team/2")
    # The first quota whose name matches the token counts. Operators have no quota.
    dave = Client(store.daemon.address, channel=store.channel("dave"))
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of token dave, sessions = 1"):
        Client(store.daemon.address, channel=store.channel("dave"))
    operators = [Client(store.daemon.address, channel=store.channel("operator")) for _ in range(3)]
    for client in (second, dave, *operators):
        client.close()


def test_a_token_deletes_its_own_jobs_if_it_may(store: Store) -> None:
    for job in ("team/dave-1", "dave"):
        make(store, "operator", job)
    forbidden = (1, "paramserver-admin: PERMISSION_DENIED: the token does not allow this\n")
    # The refusal is the same whether or not the job exists.
    for token, job in (
        ("dave", "dave"),
        ("dave", "team/dave-1"),
        ("dave", "nothing"),
        ("carol", "dave"),
        ("carol", "x"),
    ):
        assert store.delete(token, job) == forbidden
    code, told = store.delete("carol", "team/nothing")
    assert code == 1 and told == "paramserver-admin: NOT_FOUND: there is no job 'team/nothing'\n"
    assert store.delete("carol", "team/dave-1") == (0, "deleted job team/dave-1\n")
    with store.channel("operator") as channel:
        listing: Any = channel.unary_unary(
            "/paramserver.v1.StoreAdmin/ListJobs", response_deserializer=admin_pb.ListJobsResponse.FromString
        )
        assert [job.name for job in listing(b"", timeout=CALL_SECONDS).jobs] == ["dave"]
    assert "token dave is no admin's, and may not delete jobs" in store.daemon.log
    assert "token carol may delete its jobs, not job 'dave'" in store.daemon.log


def test_the_right_to_delete_is_given_and_shown_on_the_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens.toml")

    def tokens(*arguments: str) -> tuple[int, str]:
        ended = CliRunner().invoke(daemon_app, ["tokens", *arguments])
        return ended.exit_code, ended.output

    assert tokens("add", path, "--name", "carol", "--job", "team/*", "--delete")[0] == 0
    assert tokens("add", path, "--name", "dave", "--job", "dave")[0] == 0
    assert tokens("add", path, "--name", "eve", "--admin", "--delete")[0] == 2
    _, shown = tokens("list", path)
    assert shown.splitlines() == [
        "carol: job (team/*; may delete), never expires",
        "dave: job (dave), never expires",
    ]


def test_a_quota_of_tokens_that_makes_no_sense_is_refused_by_its_key(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "state", {"quotas": {"token": [{"name": "a", "weight": 2}]}}, wait=False)
    assert daemon.wait() == 2
    assert "quotas.token.0.weight" in daemon.log
