"""The life and end of sessions: broken streams, new streams, limits, notices, and the state of the daemon after a
thousand sessions."""

from __future__ import annotations

import gc
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind
from tests.integration.conftest import GRACE_SECONDS
from tests.integration.support.cutter import Cutter
from tests.integration.support.daemon import CHANNEL_OPTIONS, Daemon, admin_of, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Clients, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import DaemonRestartedError, SessionEndedError, StoreUnavailableError

CODE = grpc.StatusCode
READ, WRITE = pb.LEASE_MODE_READ, pb.LEASE_MODE_WRITE


def sessions(daemon: Daemon) -> list[admin_pb.SessionInfo]:
    with admin_of(daemon.address) as admin:
        return list(admin.ListSessions(admin_pb.ListSessionsRequest(), timeout=10).sessions)


def is_detached(daemon: Daemon, client: str) -> bool:
    return any(session.detached for session in sessions(daemon) if session.client == client)


class RawStream:
    """A Session call on a connection of its own, which ends when and how the test says."""

    def __init__(self, address: str, **hello: Any) -> None:
        self.channel = channel_to(address, options=CHANNEL_OPTIONS)
        self.store = pb_grpc.ParameterStoreStub(self.channel)
        self.outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self.outgoing.put(pb.SessionRequest(hello=pb.SessionRequest.Hello(**({"client": "raw"} | hello))))
        self.call = self.store.Session(iter(self.outgoing.get, None), wait_for_ready=True)
        self.welcome: pb.SessionResponse.Welcome = next(self.call).welcome

    def break_off(self) -> None:
        """Close the connection without ending the stream, as a dying process does."""
        self.channel.close()
        self.outgoing.put(None)

    def half_close(self) -> None:
        """End the stream in order, and return when the daemon has ended it, too."""
        self.outgoing.put(None)
        assert [response.WhichOneof("message") for response in self.call] == ["heartbeat"]
        self.channel.close()


@contextmanager
def through(daemon: Daemon, directory: Path, name: str) -> Iterator[tuple[Cutter, RankStore]]:
    """Open a session of the training library over connections that the test can cut."""
    # A client of an earlier test may have left a mapping of the same arena to the garbage collector. If the collector
    # closed it later, the kernel would release this process's locks on the arena, also that of the session's slot.
    gc.collect()
    with Cutter(directory / "cutter", daemon.socket) as cutter, closing(RankStore(cutter.address, name)) as store:
        yield cutter, store


def test_a_session_survives_the_break_of_its_stream_with_its_leases(
    clients: Clients, daemon: Daemon, job: str, tmp_path: Path
) -> None:
    layout = Layout(name=job)
    clients.rank(layout, run_id="first").begin().close()
    with through(daemon, tmp_path, "cut") as (cutter, store):
        rank = clients.rank(layout, run_id="second")
        rank.session_id = store.session_id
        rank.resume()
        group = rank.groups[0]
        (held,) = store.leases.acquire_read([SlabName(group=group, kind=pb.KIND_PARAM)], 0).wait()
        for _ in range(3):
            cutter.refusing = True
            cutter.cut()
            wait_until(lambda: is_detached(daemon, "cut"))
            cutter.refusing = False
            # This call waits until the session is attached again.
            (again,) = store.leases.acquire_read([SlabName(group=group, kind=pb.KIND_PARAM)], 0).wait()
            assert again.data.data_ptr() == held.data.data_ptr()
            store.leases.release([again]).wait()
        assert len(sessions(daemon)) == 2 and not is_detached(daemon, "cut")
        store.leases.check()
        store.leases.release([held]).wait()
        rank.train(1, 1)
        rank.assert_at(1)


def test_a_session_whose_stream_does_not_come_back_ends_after_the_grace_time(
    clients: Clients, daemon: Daemon, job: str, tmp_path: Path
) -> None:
    layout = Layout(name=job)
    clients.rank(layout, run_id="first").begin().close()
    with through(daemon, tmp_path, "cut") as (cutter, store):
        rank = clients.rank(layout, run_id="second")
        own, rank.session_id = rank.session_id, store.session_id
        rank.resume()
        rank.acquire(rank.groups[0], Kind.GRAD, WRITE, step=1)
        assert store.plane.name == "arena"
        cutter.refusing = True
        started = time.monotonic()
        cutter.cut()
        wait_until(lambda: len(sessions(daemon)) == 1)
        assert time.monotonic() - started > GRACE_SECONDS * 0.9
        assert "its stream broke, and did not come back within 0.5 s" in daemon.log
        # The session's generation word in the arena shows the end at once. Other calls learn of it from the daemon's
        # answer.
        with pytest.raises(SessionEndedError, match="leases are void"):
            store.leases.check()
        # The memory is quarantined because this process still maps it and could write to it.
        host = tiers(daemon.address)[0]
        assert host.leased_bytes == 0 and host.quarantined_bytes > 0
        cutter.refusing = False
        with pytest.raises(StoreUnavailableError):
            store.leases.acquire_read([SlabName(group=rank.groups[0], kind=pb.KIND_PARAM)], 0).wait()
        with refused(CODE.NOT_FOUND, "session is unknown or has ended; open a new one"):
            rank.call("ListVersions")
        store.close()
        wait_until(lambda: tiers(daemon.address)[0].quarantined_bytes == 0)
        rank.session_id, rank.run_id = own, "third"
        assert rank.resume() == 0


def test_a_session_whose_stream_has_bytes_that_are_no_message_is_detached(daemon: Daemon) -> None:
    hello = pb.SessionRequest(hello=pb.SessionRequest.Hello(client="garbled"))
    with channel_to(daemon.address, options=CHANNEL_OPTIONS) as channel:
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        outgoing.put(hello.SerializeToString())
        method: Any = channel.stream_stream("/paramserver.v1.ParameterStore/Session")
        call = method(iter(outgoing.get, None), timeout=20)
        next(call)
        outgoing.put(b"\xff" * 9)
        with refused(CODE.INVALID_ARGUMENT, "is no valid message"):
            next(call)
        outgoing.put(None)
    wait_until(lambda: "session of garbled ended (its stream broke" in daemon.log)


def test_a_restarted_daemon_is_recognised(tmp_path: Path) -> None:
    config = {"session_grace_seconds": 30.0}
    with Daemon(tmp_path / "state", config) as daemon:
        store = RankStore(daemon.address, "left behind")
        daemon.kill()
        # The trainer reattaches to the new daemon. A daemon that had only lost its connections would know the session.
        with Daemon(tmp_path / "state", config) as again, closing(store):
            with pytest.raises(DaemonRestartedError, match="what was not committed is gone"):
                store.leases.acquire_read([SlabName(group="any", kind=pb.KIND_PARAM)], 0)
            with closing(RankStore(again.address, "new")) as new:
                assert new.epoch != store.epoch
            assert "Traceback" not in again.log


def test_the_newer_of_two_streams_has_the_session(clients: Clients, daemon: Daemon) -> None:
    first = RawStream(daemon.address)
    second = RawStream(daemon.address, session_id=first.welcome.session_id)
    assert second.welcome.arena == first.welcome.arena and second.welcome.session_id == first.welcome.session_id
    with refused(CODE.FAILED_PRECONDITION, "another stream has taken this session up"):
        next(first.call)
    first.break_off()
    listing = pb.ListStoredJobsRequest(session_id=second.welcome.session_id)
    # The end of the older stream does not end the session, not even after the grace time.
    time.sleep(GRACE_SECONDS * 1.5)
    second.store.ListStoredJobs(listing, timeout=10)
    second.half_close()
    with refused(CODE.NOT_FOUND, "session is unknown or has ended"):
        clients.client().store.ListStoredJobs(listing, timeout=10)
    with refused(CODE.NOT_FOUND, "session is unknown or has ended; open a new one"):
        RawStream(daemon.address, session_id=second.welcome.session_id)


def test_generations_are_never_used_twice_and_slots_are(clients: Clients, daemon: Daemon) -> None:
    seen = []
    for _ in range(5):
        client = clients.client()
        seen.append(client.welcome.arena)
        client.close()
    assert len({arena.generation for arena in seen}) == 5 and all(arena.generation for arena in seen)
    assert all(arena.generation_offset >= 64 and arena.generation_offset % 16 == 0 for arena in seen)


def test_a_client_that_cannot_start_its_threads_leaves_no_session_behind(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses the thread that sends, when the session is open already."""
    start = threading.Thread.start

    def refuse_sender(thread: threading.Thread) -> None:
        if thread.name == "paramserver-sender":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_sender)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        RankStore(daemon.address, "threadless")

    wait_until(lambda: all(session.client != "threadless" for session in sessions(daemon)))


def test_a_daemon_without_a_free_seat_still_tells_a_client_that_it_was_restarted(tmp_path: Path) -> None:
    state, config = tmp_path / "state", {"max_sessions": 2, "session_grace_seconds": 30.0}
    with Daemon(state, config) as daemon, through(daemon, tmp_path, "full") as (cutter, store):
        cutter.refusing = True
        daemon.kill()
        with Daemon(state, config) as again, Clients(again.address) as clients:
            opened = [clients.client() for _ in range(2)]
            cutter.refusing = False
            with pytest.raises(DaemonRestartedError, match="what was not committed is gone"):
                store.leases.acquire_read([SlabName(group="any", kind=pb.KIND_PARAM)], 0)
            assert len(sessions(again)) == len(opened)


def test_more_sessions_than_allowed_are_refused_by_the_name_of_the_key(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state", {"max_sessions": 2}) as daemon, Clients(daemon.address) as clients:
        opened = [clients.client() for _ in range(2)]
        with refused(CODE.RESOURCE_EXHAUSTED, "max_sessions: 2 sessions are open", "raise max_sessions"):
            clients.client()
        opened[0].close()
        clients.client()


def test_everybody_is_told_when_requests_wait_for_room_and_when_they_do_not(
    clients: Clients, daemon: Daemon, job: str
) -> None:
    layout = Layout(name=job, numels=(786_432,), groups=("a", "b"), with_skips=False)
    rank = clients.rank(layout).begin()
    other = clients.client()
    held = [rank.acquire(group, Kind.GRAD, WRITE, step=1) for group in "ab"]
    wants = [
        pb.AcquireLeasesRequest.Want(slab=pb.SlabName(group=group, kind=kind), mode=READ)
        for group in "ab"
        for kind in (pb.KIND_PARAM, pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ)
    ]
    with refused(CODE.DEADLINE_EXCEEDED):
        rank.call("AcquireLeases", wants=wants, seconds=3.0)
    wait_until(lambda: all(len(client.notices) == 2 for client in (rank, other)))
    for client in (rank, other):
        pressure, relief = client.notices
        assert "requests wait for room in host memory" in pressure and "host_budget is 16.0 MiB" in pressure
        assert relief == "host memory has room for all requests again"
    for lease in held:
        rank.release(lease)


def test_operators_see_who_is_connected_and_what_they_hold(clients: Clients, daemon: Daemon, job: str) -> None:
    def admin(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["sessions", "--address", daemon.address, *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    rank = clients.rank(Layout(name=job), name="[a] trainer").begin()
    leases = [rank.acquire(rank.groups[0], Kind.PARAM, READ), rank.acquire(rank.groups[1], Kind.GRAD, WRITE, step=1)]
    clients.client(name="idle")
    # Mappings that earlier tests left to the garbage collector end now. Each has a descriptor of the arena, and if a
    # process closes any descriptor of a file, it loses its locks on the file (man 2 fcntl_locking), here the lock of
    # the session `mapped` on its slot.
    gc.collect()
    with closing(RankStore(daemon.address, "mapped")):
        trainer, idle, mapped = json.loads(admin("--json"))["sessions"]
    assert (trainer["client"], trainer["job"], trainer["rank"]) == ("[a] trainer", job, 0)
    assert (trainer["read_leases"], trainer["write_leases"]) == (1, 1)
    assert trainer["leased_bytes"] == sum(lease.size_bytes for lease in leases)
    assert abs(trainer["opened_at_unix_seconds"] - time.time()) < 60 and 0 <= trainer["heard_seconds_ago"] < 3
    assert trainer["peer"].startswith("unix:") and not trainer["detached"]
    assert (idle["client"], idle["job"], idle["write_leases"]) == ("idle", "", 0)
    assert [session["maps_arena"] for session in (idle, mapped)] == [False, True]
    table = admin()
    assert "[a] trainer" in table and "attached" in table and job in table.replace("\n", "")
    raw = RawStream(daemon.address)
    raw.break_off()
    wait_until(lambda: is_detached(daemon, "raw"))
    assert "detached" in admin()
    for lease in leases:
        rank.release(lease)


# This process runs without torch. It leaves five sessions behind, each with a reader and a lease. Two of them have the
# arena mapped.
ABANDON = """
import os, signal, sys
from tests.integration.test_session_life import cycle
from trainer_client.client.transport.arena import MappedArena
kept = [cycle(*sys.argv[1:]) for _ in range(5)]
arenas = [MappedArena.map(stream.welcome.arena) for stream in kept[:2]]
assert all(arenas)
os.kill(os.getpid(), signal.SIGKILL)
"""


def cycle(address: str, job: str, fqn: str) -> RawStream:
    """Open a session with a reader and with a lease on a range of it."""
    stream = RawStream(address)
    session_id = stream.welcome.session_id
    reader = stream.store.OpenReader(pb.OpenReaderRequest(session_id=session_id, job=job), timeout=20)
    wanted = pb.TensorRange(fqn=fqn, kind=pb.KIND_PARAM, numel=16, reader_id=reader.reader_id)
    want = pb.AcquireLeasesRequest.Want(range=wanted, mode=READ)
    stream.store.AcquireLeases(pb.AcquireLeasesRequest(session_id=session_id, wants=[want]), timeout=20)
    return stream


def held_by(daemon: Daemon) -> dict[str, Any]:
    """Return the resources that a daemon could leak, by name."""
    process = Path(f"/proc/{daemon.process.pid}")
    host, nvme = tiers(daemon.address)
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "mappings of the arena": (process / "maps").read_text().count("paramserver-arena"),
        "sessions": len(sessions(daemon)),
        "host": (host.used_bytes, host.leased_bytes, host.quarantined_bytes, host.queue_depth),
        "nvme": nvme.used_bytes,
    }


def test_nothing_is_left_of_a_thousand_clients_that_connect_and_die(clients: Clients, tmp_path: Path) -> None:
    layout = Layout(name="job")
    with Daemon(tmp_path / "state", {"session_grace_seconds": 0.2}) as daemon:
        with Clients(daemon.address) as trainers:
            trainers.rank(layout).begin()
        fqn = layout.job().parameters[0].fqn
        # This session makes the daemon allocate what it allocates only once: connections of this process, and buffers
        # of the first reader.
        cycle(daemon.address, "job", fqn).break_off()
        wait_until(lambda: held_by(daemon)["sessions"] == 0)
        time.sleep(0.2)
        before = held_by(daemon)
        arguments = [sys.executable, "-c", ABANDON, daemon.address, "job", fqn]
        dying = [subprocess.Popen(arguments, cwd=ROOT) for _ in range(4)]
        for _ in range(980):
            cycle(daemon.address, "job", fqn).break_off()
        for process in dying:
            assert process.wait(30) == -9
        wait_until(lambda: held_by(daemon) == before)
        assert daemon.log.count("session opened by raw") == 1 + 980 + 20
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def test_a_client_that_cannot_map_the_arena_leaves_no_session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: pb.Arena, driver: None, *, is_announced: bool) -> None:
        raise OSError("no address space")

    monkeypatch.setattr("trainer_client.client.transport.attachment.MappedArena.map", fail)
    with pytest.raises(OSError, match="no address space"):
        StoreClientSync.connect(daemon.address, client="unmapped")

    wait_until(lambda: all(session.client != "unmapped" for session in sessions(daemon)))
