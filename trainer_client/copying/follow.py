"""The follower: a process that keeps a replica of a job, by copying its newest settled step to another daemon.

A rank of the trainer starts it, and tells it by its standard input where the two daemons are: `FollowerOrder` as one
line of JSON. The follower tells on its standard output how far it is, a line of JSON each time. It is a process of its
own, so that it takes no time from the training loop's interpreter, and so that it outlives a trainer that is killed:
when its standard input ends, it finishes the newest settled step and ends.

A follower that is slower than the commits skips to the newest one, so it never keeps more than one step from being
freed. This module owns the two connections, and the run that puts. It must never change the job that it copies.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from paramserver.v1 import store_admin_pb2 as admin_pb
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.connection import Call, CallCancelledError, Connection
from trainer_client.client.store_client.types import StoredJob
from trainer_client.client.transport.channel import CONTROL_DEADLINE_SECONDS
from trainer_client.client.transport.credentials import Credentials
from trainer_client.copying.daemon_step import DaemonStep
from trainer_client.copying.pace import Pace
from trainer_client.copying.put_step import PutRun
from trainer_client.errors import ConfigError, StoreError, TrainerClientError
from trainer_client.training.run import rolled_back
from trainer_client.training.run.rolled_back import RollBacks

# The follower reports at least this often, because a restarted daemon does not know of it.
_REPORT_SECONDS = 5.0
# The pause after a failed copy doubles from the first to the second of these.
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 5.0
# The holder has to answer within this time before a step is opened for it.
_ANSWER_SECONDS = 5.0
# A follower without a trainer gives up when the daemon that it copies from has not answered for so long.
_GONE_SECONDS = 10.0
_FILES = ("token_file", "tls_ca", "tls_certificate", "tls_key")
# The follower yields the processor to trainers and daemons.
_NICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonPlace:
    """A daemon, and the files of the credentials for it."""

    address: str
    token_file: str | None = None
    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    insecure: bool = False

    @classmethod
    def of(cls, address: str, credentials: Credentials) -> Self:
        """Return the place of a daemon. The credentials name a token by its file, or have none."""
        given = {name: getattr(credentials, name) for name in _FILES}
        files = {name: str(path) for name, path in given.items() if path is not None}
        return cls(address=address, insecure=credentials.insecure, **files)

    def read_files(self) -> list[bytes | None]:
        """Return what the files of the credentials hold now; None for a file that cannot be read."""
        return [_content(path) for name in _FILES if (path := getattr(self, name)) is not None]

    def connect(self) -> Connection:
        """Return a connection, which is made on first use. It can raise ConfigError."""
        given = {name: getattr(self, name) for name in _FILES}
        files: Mapping[str, Any] = {name: Path(path) for name, path in given.items() if path is not None}
        client = f"follower at {socket.gethostname()}, process {os.getpid()}"
        credentials = Credentials(insecure=self.insecure, **files)
        return Connection(self.address, client, credentials, prefer_streams=False)


def _content(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


class _FollowedDaemon:
    """A connection to a daemon that can be made anew with another token or other certificates. It is made on first use.

    Attributes:
        connection: the connection.
    """

    def __init__(self, place: DaemonPlace) -> None:
        """Prepare the connection. It can raise ConfigError."""
        self._place = place
        self._renewing = threading.Lock()
        # The contents of the files of the credentials, read just before they are read for the connection.
        self._files = place.read_files()
        self.connection = place.connect()

    def renew(self) -> bool:
        """Connect anew if the files of the credentials hold others now, and return whether that was so."""
        with self._renewing:
            files = self._place.read_files()
            if files == self._files:
                return False
            try:
                connection = self._place.connect()
            except ConfigError:
                # A file that is just being replaced cannot be used. The next call looks again.
                return False
            former, self.connection, self._files = self.connection, connection, files
        former.close()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerOrder:
    """What a follower is to do.

    Attributes:
        job: the job.
        origin: the daemon that commits it.
        holder: the daemon that gets the replica.
        held_as: the name of the replica there, see paramserver/contract/replica_names.py; None: the name of the job.
        bytes_a_second: the most bytes that the follower sends in a second; None: as many as it can.
        finish_seconds: how long the follower goes on at most after its standard input has ended.
    """

    job: str
    origin: DaemonPlace
    holder: DaemonPlace
    finish_seconds: float
    held_as: str | None = None
    bytes_a_second: int | None = None

    def to_json(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the order that `to_json` made."""
        values = json.loads(line)
        return cls(**values | {name: DaemonPlace(**values[name]) for name in ("origin", "holder")})


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerState:
    """How far a follower is.

    Attributes:
        step: the newest step that the holder has by this follower; None: it has put none yet.
        sent_bytes: the bytes that were sent, in all.
        copy_seconds: how long the last copied step took.
        problem: why the last attempt failed; "": it did not.
    """

    step: int | None = None
    sent_bytes: int = 0
    copy_seconds: float = 0.0
    problem: str = ""


class Follower:
    """The copying of one job to one holder. `run` does it on the calling thread, until `finish` was called.

    Attributes:
        state: how far it is; guarded by the lock of the condition.
    """

    def __init__(self, order: FollowerOrder, tell: Callable[[FollowerState], None]) -> None:
        """Prepare a follower; `tell` is called after each change of its state. It can raise ConfigError."""
        self.state = FollowerState()
        self._order = order
        self._tell = tell
        self._origin = _FollowedDaemon(order.origin)
        self._holder = _FollowedDaemon(order.holder)
        self._changed = threading.Condition()
        # The newest settled step, as the watching thread has heard. The follower itself asks the daemon.
        self._newest: int | None = None
        self._finish_at: float | None = None
        self._watching = Call(_GONE_SECONDS, _GONE_SECONDS)
        self._put_run = self._new_put_run()

    def _new_put_run(self) -> PutRun:
        # A replica under a name of its own is no other program's, so steps that its job has left may be given up.
        return PutRun(
            self._holder.connection,
            pace=Pace(self._order.bytes_a_second),
            gives_up_newer=self._order.held_as is not None,
            still_has=self._still_has,
            rolled_back=self._ask_rolled_back,
        )

    def finish(self) -> None:
        """Let `run` copy the newest step and return. Any thread may call this."""
        with self._changed:
            self._finish_at = time.monotonic() + self._order.finish_seconds
            self._changed.notify_all()

    def run(self) -> None:
        """Copy until the end: until `finish` was called, and the holder has the newest step or cannot get it."""
        # The first step may take long, and the daemon shows meanwhile that there is no replica yet.
        self._report()
        threading.Thread(target=self._watch, name="follower-watch", daemon=True).start()
        pause = _FIRST_PAUSE_SECONDS
        try:
            while self._wait_for_a_step():
                try:
                    self._copy()
                    pause = _FIRST_PAUSE_SECONDS
                except (TrainerClientError, OSError) as error:
                    # An OSError comes if the follower cannot map the memory of a daemon, for example while the machine
                    # has none left.
                    self._put_run.close(error)
                    self._renew_links()
                    self._tell_problem(str(error) or type(error).__name__)
                    if self._gives_up():
                        return
                    with self._changed:
                        self._changed.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            self._put_run.close()
            self._watching.cancel()
            self._origin.connection.close()
            self._holder.connection.close()

    def _renew_links(self) -> None:
        """Go on with the credentials that are in their files now.

        A daemon may have refused those that were used before, because they were replaced while the follower ran.
        """
        self._origin.renew()
        if self._holder.renew():
            self._put_run = self._new_put_run()

    def _watch(self) -> None:
        """Hear of each commit, on a thread of its own."""
        with contextlib.suppress(CallCancelledError):
            while True:
                origin = self._origin.connection
                try:
                    for commit in StoreClientSync(origin).watch(self._order.job, timeout=self._watching):
                        with self._changed:
                            self._newest = commit.step
                            self._changed.notify_all()
                            is_well_again = bool(self.state.problem) and commit.step == self.state.step
                        if is_well_again:
                            self._tell_problem("")
                except (TrainerClientError, OSError) as error:
                    # The other thread closes the connection that it replaces, which is no problem of the daemon.
                    if origin is not self._origin.connection or self._origin.renew():
                        continue
                    # A copy that is under way waits longer for the daemon, which may be started again.
                    self._tell_problem(f"the commits at {self._order.origin.address} cannot be watched: {error}")
                    self._watching.extend()
                    self._watching.pause(_FIRST_PAUSE_SECONDS)

    def _wait_for_a_step(self) -> bool:
        """Wait until there is a step that the holder lacks. Return whether there is; False: the follower is done."""
        while True:
            with self._changed:
                if self._newest is not None and self._newest != self.state.step:
                    return True
                if self._finish_at is not None:
                    break
                is_changed = self._changed.wait(_REPORT_SECONDS)
            if not is_changed:
                self._report()
        # The watching thread may not have heard of the last commit yet.
        newest = self._ask_newest()
        return newest is not None and newest != self.state.step

    def _ask_newest(self) -> int | None:
        """Return the newest settled step; None if there is none or the daemon does not answer."""
        try:
            job = self._ask_job()
        except (StoreError, OSError):
            return None
        return None if job is None else job.step

    def _still_has(self, layout: str, step: int) -> bool:
        """Return whether the daemon that is copied from has a step, settled or not. It can raise StoreError."""
        job = self._ask_job()
        return job is not None and any(step in one.steps for one in job.layouts if one.name == layout)

    def _ask_rolled_back(self) -> RollBacks:
        """Return the roll-backs of the job by operators. It can raise StoreError."""
        with DaemonStep(self._origin.connection, self._order.job) as newest:
            named = rolled_back.of_states(newest.description.client_states)
        job = self._ask_job()
        return {**named, **rolled_back.of_layouts(() if job is None else job.layouts)}

    def _ask_job(self) -> StoredJob | None:
        """Return the job as the origin has it; None if it has nothing of it. It can raise StoreError."""
        call = Call(_GONE_SECONDS, _GONE_SECONDS)
        jobs = StoreClientSync(self._origin.connection).list_jobs(timeout=call)
        return next((job for job in jobs if job.name == self._order.job), None)

    def _copy(self) -> None:
        """Copy the newest settled step. It can raise TrainerClientError."""
        if not self._put_run.sessions:
            # No step is held while the holder does not answer, so that it is the newest one that goes there afterwards.
            self._holder.connection.session(Call(_ANSWER_SECONDS, _ANSWER_SECONDS))
        with self._changed:
            heard = self._newest
        with DaemonStep(self._origin.connection, self._order.job, put_as=self._order.held_as) as source:
            step = source.description
            # A follower without a trainer compares all bytes again, because another run may have gone back meanwhile.
            # So it does if the step is older than the one before, as after a restart of the daemon.
            is_older = self.state.step is not None and step.step.step < self.state.step
            if self._finish_at is not None or is_older or not self._put_run.takes(step):
                self._put_run.close()
            result = self._put_run.put(source)
        with self._changed:
            # A step that was heard of before is not the newest one if the job was rolled back since. The daemon tells
            # its watchers of commits only.
            if self._newest is None or self._newest == heard or self._newest < result.step:
                self._newest = result.step
            self.state = FollowerState(
                step=result.step,
                sent_bytes=self.state.sent_bytes + result.sent_bytes,
                copy_seconds=result.seconds,
            )
            self._tell(self.state)
        self._report()

    def _gives_up(self) -> bool:
        """Return whether a failed copy is not to be tried again: the trainer is gone, and so are time or origin."""
        with self._changed:
            finish_at = self._finish_at
        return finish_at is not None and (time.monotonic() >= finish_at or self._ask_newest() is None)

    def _tell_problem(self, problem: str) -> None:
        with self._changed:
            self.state = replace(self.state, problem=problem)
            self._tell(self.state)
            is_finishing = self._finish_at is not None
        # Another run may have opened the job meanwhile, and the daemon shows the replicas of the last run.
        if not is_finishing:
            self._report()

    def _report(self) -> None:
        """Report to the daemon that commits the job. A failure is ignored, because the follower reports again."""
        state = self.state
        request = admin_pb.ReportReplicaRequest(
            job=self._order.job,
            holder=self._order.holder.address,
            step=state.step,
            sent_bytes=state.sent_bytes,
            copy_seconds=state.copy_seconds,
            problem=state.problem,
            finishing=self._finish_at is not None,
        )
        with contextlib.suppress(TrainerClientError):
            self._origin.connection.admin_call("ReportReplica", request, Call(None, CONTROL_DEADLINE_SECONDS))


def main() -> None:
    """Follow as standard input says, until that has ended."""
    os.nice(_NICE)
    order = FollowerOrder.from_json(sys.stdin.readline())
    follower = Follower(order, _print)

    def until_the_trainer_is_gone() -> None:
        sys.stdin.read()
        follower.finish()
        # A call to a daemon that does not answer may take longer. The holder keeps nothing of an unfinished step.
        time.sleep(order.finish_seconds)
        os._exit(1)

    threading.Thread(target=until_the_trainer_is_gone, name="follower-stdin", daemon=True).start()
    follower.run()


def _print(state: FollowerState) -> None:
    # A trainer that was killed does not read any more.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(asdict(state)), flush=True)


if __name__ == "__main__":
    main()
