"""A daemon's start and end: one daemon per state directory, errors that name the cause, and a stop that keeps the
committed step."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import grpc
import pytest
import torch

import trainer_client
from paramserver.server import STOP_GRACE_SECONDS
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import MIB, Daemon, admin_of, run_serve
from tests.integration.support.mounts import fill, small_disk
from tests.integration.support.store_client import CALL_SECONDS, Clients, Rank, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.config.loading import load_config
from trainer_client.errors import LocalDaemonError
from trainer_client.training.run.local_daemon import LocalDaemon


def test_sigterm_tells_the_clients_abandons_the_open_step_and_keeps_the_committed_one(tmp_path: Path) -> None:
    layout = Layout()
    with Daemon(tmp_path / "state", flags=["--log-format", "json"], fresh=True) as daemon:
        rank = Rank(daemon.address, layout).begin()
        rank.train(1, 2)
        rank.hand_over(3)
        started = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started < STOP_GRACE_SECONDS, "the daemon has waited for calls that go on"
        assert rank.ended.wait(30) and rank.notices == ["the store daemon is shutting down"]
        rank.close()
        assert not daemon.socket.exists() and not Path(f"{daemon.socket}.arena").exists()
        events = [json.loads(line) for line in daemon.log.splitlines()]
        assert {"event", "level", "logger", "timestamp"} <= set(events[0])
        assert events[-1]["event"] == "stopped" and not any("exception" in event for event in events)
    with Daemon(tmp_path / "state") as daemon:
        rank = Rank(daemon.address, layout)
        assert rank.resume() == 2
        rank.assert_at(2)
        rank.close()
        assert daemon.stop() == 0


@pytest.fixture(scope="module")
def of_a_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDaemon]:
    """A daemon that a job has started, with variables that are for the job and not for its daemon."""
    state = tmp_path_factory.mktemp("job") / "state"
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        variables.setenv("TORCH_CUDA_SANITIZER", "1")
        variables.setenv("NOTIFY_SOCKET", "@the-manager-of-the-trainer")
        # The umask of most users.
        former = os.umask(0o022)
        try:
            daemon = LocalDaemon(state, ["--state-dir", str(state), "--host-budget", "32MiB"], restarts=False)
        finally:
            os.umask(former)
    yield daemon
    daemon.stop()


def test_a_daemon_that_a_job_starts_sees_no_gpu(of_a_job: LocalDaemon) -> None:
    """A context on a GPU takes memory there, and an error on the GPU would end the store of all jobs.

    With the other variable, torch would look for a GPU at each operation of the daemon.
    """
    variables = Path(f"/proc/{of_a_job._process.pid}/environ").read_bytes().split(b"\0")
    assert [one for one in variables if b"CUDA" in one.partition(b"=")[0]] == [b"CUDA_VISIBLE_DEVICES="]


def test_a_daemon_that_a_job_starts_tells_nothing_to_the_manager_of_the_trainer(of_a_job: LocalDaemon) -> None:
    """A manager that listens to all processes of a service takes STOPPING=1 for the end of the service."""
    assert b"NOTIFY_SOCKET" not in Path(f"/proc/{of_a_job._process.pid}/environ").read_bytes()


def test_what_a_job_makes_for_its_daemon_is_for_its_user_alone(of_a_job: LocalDaemon) -> None:
    """The log has names of jobs and clients."""
    made = [of_a_job._state_dir, *of_a_job._state_dir.iterdir()]
    assert "daemon.log" in {path.name for path in made}
    assert [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_a_daemon_that_a_job_starts_listens_where_the_job_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMSERVER_SERVE_SOCKET", str(tmp_path / "elsewhere.sock"))
    # Without this, a failure would take two minutes.
    monkeypatch.setattr("trainer_client.training.run.local_daemon._START_SECONDS", 30.0)
    section = {"state_dir": str(tmp_path / "state"), "host_budget": "32MiB", "reattach_timeout_seconds": 0}
    daemon = LocalDaemon.of(load_config({"paramserver": section}, {}))
    daemon.stop()
    assert daemon.address == f"unix:{tmp_path}/state/paramserver.sock"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_daemon_of_a_job_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers of a data loader are forked after the daemon was started, and may live on when the engine is closed."""
    # Without this, a failure would take a minute.
    monkeypatch.setattr("trainer_client.training.run.local_daemon._STOP_SECONDS", 10.0)
    daemon = LocalDaemon(tmp_path, ["--state-dir", str(tmp_path), "--host-budget", "32MiB"], restarts=False)
    worker = multiprocessing.get_context("fork").Process(target=signal.pause)
    worker.start()
    try:
        daemon.stop()
    finally:
        worker.kill()
        worker.join()
    assert "has not stopped within" not in caplog.text


def test_of_two_trainers_that_start_a_daemon_at_once_the_later_one_is_refused(tmp_path: Path) -> None:
    """The daemon of the first one stops with its trainer, so the later trainer must not take it for its own."""
    daemon = LocalDaemon(tmp_path, ["--state-dir", str(tmp_path), "--host-budget", "32MiB"], restarts=False)
    try:
        # The later trainer has found no lock before, because the daemons take some time to begin.
        with TemporaryFile() as output:
            later = daemon._spawn(output)
            with pytest.raises(LocalDaemonError, match=f"in use by the daemon with pid {daemon._process.pid}"):
                daemon._wait_until_serving(later, 0, output)
        daemon._close_stdin(later)
        assert later.wait() == 1
    finally:
        daemon.stop()


def test_a_daemon_whose_log_lies_on_a_full_disk_tells_its_job_why_it_ends(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # A process keeps the directory of a socket with a long path open, so the disk has a short path.
    with small_disk(tmp_path_factory.mktemp("full") / "disk", MIB) as disk:
        state = disk / "state"
        state.mkdir()
        fill(disk)
        with pytest.raises(LocalDaemonError, match=rf"cannot lock {state}/lock: No space left on device; free space"):
            LocalDaemon(state, ["--state-dir", str(state), "--host-budget", "32MiB"], restarts=False)
        assert (state / "daemon.log").read_bytes() == b""


def test_a_daemon_that_is_killed_at_its_start_leaves_an_error_that_says_so(of_a_job: LocalDaemon) -> None:
    """The kernel kills a daemon at its start where the memory limit of a container is below the host budget."""
    with TemporaryFile() as output:
        killed = of_a_job._spawn(output)
        killed.kill()
        log_bytes = of_a_job._log_size()
        with pytest.raises(LocalDaemonError, match="stopped by SIGKILL") as caught:
            of_a_job._wait_until_serving(killed, log_bytes, output)
    of_a_job._close_stdin(killed)
    assert "lower host_budget, or raise the memory limit" in str(caught.value)


def test_a_state_directory_that_a_job_cannot_write_to_is_named(tmp_path: Path) -> None:
    # A directory in the place of the log is refused to root, too.
    (tmp_path / "daemon.log").mkdir()
    with pytest.raises(
        LocalDaemonError, match=rf"in {tmp_path} \(Is a directory: {tmp_path}/daemon.log\): let this user"
    ):
        LocalDaemon(tmp_path, ["--state-dir", str(tmp_path)], restarts=False)


def test_a_second_ctrl_c_ends_the_wait_for_the_daemon_and_leaves_the_error_of_the_first_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = {"state_dir": str(tmp_path / "state"), "host_budget": "32MiB"}
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": {"type": "AdamW"}, "paramserver": section}
    engine, *_ = trainer_client.initialize(model=torch.nn.Linear(1, 1), config=config)
    daemon, main = int((tmp_path / "state" / "lock").read_text()), threading.main_thread().ident
    assert main is not None
    is_closed = threading.Event()

    def press_again() -> None:
        while not is_closed.wait(1.0):
            signal.pthread_kill(main, signal.SIGINT)

    presses = threading.Thread(target=press_again)
    # A daemon that is stopped neither answers nor ends, so each wait lasts until it is interrupted.
    os.kill(daemon, signal.SIGSTOP)
    try:
        with pytest.raises(KeyboardInterrupt, match="the first") as caught, engine:
            presses.start()
            raise KeyboardInterrupt("the first")
        is_closed.set()
        assert caught.value.__context__ is None
        assert "interrupted again, so the engine does not wait" in caplog.text
    finally:
        is_closed.set()
        os.kill(daemon, signal.SIGCONT)
        presses.join()
    # Its standard input was closed, so it ends by itself.
    wait_until(lambda: not Path(f"/proc/{daemon}").exists())


def test_sigterm_waits_for_the_commit_that_a_rank_has_voted_for(tmp_path: Path) -> None:
    """A commit may write to memory that clients have mapped, so no session ends while one is under way."""
    layout = Layout(groups=("a", "b"))
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        ranks = [clients.rank(layout, rank=rank, ranks=2) for rank in range(2)]
        for rank in ranks:
            rank.open()
            rank.register()
            rank.stage_all()

        def vote(rank: Rank, step: int) -> Any:
            request = pb.CommitStepRequest(session_id=rank.session_id, step=step, client_state=b"")
            return rank.store.CommitStep.future(request, timeout=CALL_SECONDS)

        votes = [vote(rank, 0) for rank in ranks]
        assert [made.exception() for made in votes] == [None, None]
        for rank in ranks:
            rank.hand_over(1)
        first = vote(ranks[0], 1)
        # The daemon takes the calls of a connection in their order, so it has counted the vote when it answers these.
        for _ in range(5):
            ranks[0].call("ReadCounters")
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in daemon.log)
        with refused(grpc.StatusCode.UNAVAILABLE, "is shutting down; connect again when it has been started anew"):
            clients.client()
        second = vote(ranks[1], 1)
        assert (first.exception(), second.exception()) == (None, None)
        assert daemon.wait() == 0
        assert all(rank.ended.wait(CALL_SECONDS) for rank in ranks)
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        assert clients.rank(layout, ranks=2).open()[-1].step == 1


def test_a_second_daemon_is_refused_by_the_pid_of_the_first_which_goes_on(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state", flags=["--exit-with-stdin"], fresh=True) as daemon:
        second = run_serve("--state-dir", str(tmp_path / "state"), "--host-budget", "16MiB")
        assert second.returncode == 1
        assert f"in use by the daemon with pid {daemon.process.pid}; stop that one" in second.stderr
        assert "Traceback" not in second.stderr
        assert daemon.is_serving()
        # The daemon's standard input reaches its end when the daemon's parent closes it.
        daemon.close_stdin()
        assert daemon.wait() == 0
    with Daemon(tmp_path / "state") as daemon:
        assert daemon.stop() == 0


def test_a_socket_that_another_daemon_listens_on_is_not_taken_over(tmp_path: Path) -> None:
    with Daemon(tmp_path / "one") as daemon:
        second = run_serve(
            *("--state-dir", str(tmp_path / "two"), "--host-budget", "16MiB", "--socket", str(daemon.socket))
        )
        assert second.returncode == 1
        assert f"{daemon.socket}" in second.stderr and "in use" in second.stderr
        assert daemon.is_serving()
        Rank(daemon.address, Layout()).begin().close()


def test_everything_it_makes_is_for_its_user_alone(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        Rank(daemon.address, Layout()).begin().close()
        made = [daemon.state_dir, *daemon.state_dir.iterdir()]
        names = {path.name for path in made}
        assert {"lock", "catalog.sqlite", "data.0", "paramserver.sock", "paramserver.sock.arena"} <= names
        open_to_others = [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077]
        assert open_to_others == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--host-budget", "lots"], "host_budget = 'lots'"),
        (["--listen", "0.0.0.0:0"], "listen: 0.0.0.0:0 can be reached from other machines"),
        (["--token-file", "/nonexistent/t.toml"], "token_file: cannot read /nonexistent/t.toml: No such file"),
        (
            [
                *("--listen", "0.0.0.0:0", "--tls-certificate", "/nonexistent/c.pem"),
                *("--tls-key", "/nonexistent/k.pem", "--tls-client-ca", "/nonexistent/a.pem"),
            ],
            "tls_certificate: cannot read /nonexistent/c.pem: No such file or directory",
        ),
        (["--exit-with-stdin"], "--exit-with-stdin: standard input is closed, a file or /dev/null"),
        (["--config", "/nonexistent/p.toml"], "cannot read config file /nonexistent/p.toml: No such file or directory"),
    ],
)
def test_a_bad_configuration_ends_with_2_before_anything_is_made(
    tmp_path: Path, arguments: list[str], named: str
) -> None:
    ended = run_serve("--state-dir", str(tmp_path / "state"), *arguments)
    assert ended.returncode == 2 and named in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "state").exists()


def test_a_state_directory_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run_serve("--state-dir", str(tmp_path / "file" / "state"))
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"cannot make directory {tmp_path}/file/state: Not a directory; choose another --state-dir" in ended.stderr
    assert "choose another --state-dir" in ended.stderr


def test_a_state_directory_that_cannot_be_written_is_named() -> None:
    # /sys/kernel is read-only for root, too.
    ended = run_serve("--state-dir", "/sys/kernel")
    assert ended.returncode == 1 and "/sys/kernel/lock" in ended.stderr and "Traceback" not in ended.stderr


def test_a_daemon_that_stops_leaves_the_sockets_of_another_one_that_is_at_its_path(tmp_path: Path) -> None:
    """An operator may move or remove the directory of a daemon that runs, and start another daemon there."""
    with Daemon(tmp_path / "state") as former:
        (tmp_path / "state").rename(tmp_path / "away")
        with Daemon(tmp_path / "state") as latter:
            assert former.stop() == 0
            assert latter.is_serving()
            # The rank maps the arena, whose descriptor comes through the second socket.
            Rank(latter.address, Layout()).begin().close()
            assert latter.stop() == 0
    assert [path.name for path in (tmp_path / "state").iterdir() if path.is_socket()] == []


def test_a_socket_in_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    ended = run_serve(
        *("--state-dir", str(tmp_path / "state"), "--host-budget", "16MiB", "--socket", str(tmp_path / "no" / "s.sock"))
    )
    assert ended.returncode == 1 and f"{tmp_path}/no/s.sock" in ended.stderr and "Traceback" not in ended.stderr


def test_it_listens_on_loopback_when_asked_and_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_serve("--state-dir", str(tmp_path / "state"), "--host-budget", "16MiB", "--listen", address)
        assert ended.returncode == 1 and f"cannot listen on listen address {address}" in ended.stderr
    with Daemon(tmp_path / "state", flags=["--listen", address]) as daemon, admin_of(address) as admin:
        reading = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10)
        assert reading.state_dir == str(daemon.state_dir)
        layout = Layout()
        rank = Rank(address, layout).begin()
        rank.train(1, 1)
        rank.assert_at(1)
        rank.close()


def test_damaged_files_are_refused_by_their_name(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        Rank(daemon.address, Layout()).begin().close()
        daemon.stop()
    data = tmp_path / "state" / "data.0"
    size = data.stat().st_size
    os.truncate(data, 4096)
    ended = run_serve("--state-dir", str(tmp_path / "state"), "--host-budget", "16MiB", "--nvme-budget", "64MiB")
    assert ended.returncode == 1 and f"{data} does not match the catalog" in ended.stderr
    os.truncate(data, size)
    (tmp_path / "state" / "catalog.sqlite").write_bytes(b"garbage" * 1000)
    ended = run_serve("--state-dir", str(tmp_path / "state"), "--host-budget", "16MiB", "--nvme-budget", "64MiB")
    assert ended.returncode == 1 and "catalog.sqlite is damaged" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_client_is_told_at_once_when_the_daemon_is_killed(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        rank = Rank(daemon.address, Layout()).begin()
        daemon.kill()
        assert rank.ended.wait(30)
        with pytest.raises(grpc.RpcError) as caught:
            rank.commit(1)
        assert isinstance(caught.value, grpc.Call) and caught.value.code() is grpc.StatusCode.UNAVAILABLE
        rank.close()
