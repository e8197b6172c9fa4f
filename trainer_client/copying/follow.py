"""The follower: a process that keeps a replica of a job, by copying its newest settled step to another daemon.

A rank of the trainer starts the follower, and writes a `FollowerOrder` as one line of JSON to its standard input. The
order says where the two daemons are. The follower writes its progress to its standard output, as a line of JSON after
each change. The follower is a process of its own, so that it takes no time from the training loop's interpreter, and so
that it outlives a trainer that is killed: when its standard input ends, it copies the newest settled step and ends.

A follower that copies more slowly than the trainer commits skips to the newest step. So it never keeps more than one
step from being freed. This module owns the connections to the two daemons, and the run that puts the steps. It must
never change the job that it copies.
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

# The follower reports to the origin daemon at least this often, because a daemon that was restarted does not know of
# the follower until it reports.
_REPORT_SECONDS = 5.0
# The pause after a failed copy is _FIRST_PAUSE_SECONDS. The pause doubles with each further failure, up to
# _LONGEST_PAUSE_SECONDS.
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 5.0
# Before the follower opens a step to copy it, the holder has to answer a call within this time. If the holder does not,
# the copy fails before the follower holds a step at the origin.
_ANSWER_SECONDS = 5.0
# After its trainer has ended, a follower gives up when the daemon that it copies from has not answered for this time.
_GONE_SECONDS = 10.0
_FILES = ("token_file", "tls_ca", "tls_certificate", "tls_key")
# The niceness that is added to the follower's process, so that trainers and daemons get the processor first.
_NICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonPlace:
    """The address of a daemon, and the files of the credentials with which the follower connects to it."""

    address: str
    token_file: str | None = None
    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    insecure: bool = False

    @classmethod
    def of(cls, address: str, credentials: Credentials) -> Self:
        """Return the address with the credentials' files. The credentials must have no token, or have it in a file."""
        given = {name: getattr(credentials, name) for name in _FILES}
        files = {name: str(path) for name, path in given.items() if path is not None}
        return cls(address=address, insecure=credentials.insecure, **files)

    def read_files(self) -> list[bytes | None]:
        """Return the present content of each file of the credentials; None for a file that cannot be read."""
        return [_content(path) for name in _FILES if (path := getattr(self, name)) is not None]

    def connect(self) -> Connection:
        """Return a connection to the daemon, which connects on first use. It can raise ConfigError."""
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
    """A connection to a daemon, which is replaced when its token or certificates have changed.

    Attributes:
        connection: the present connection, which connects on first use.
    """

    def __init__(self, place: DaemonPlace) -> None:
        """Prepare a connection to the daemon at `place`, which connects on first use. It can raise ConfigError."""
        self._place = place
        self._renewing = threading.Lock()
        # The contents of the token file and the TLS files, which are read here before the connection reads the files.
        # If a file is replaced in between, `renew` finds a difference and connects once more, which does no harm.
        self._files = place.read_files()
        self.connection = place.connect()

    def renew(self) -> bool:
        """Replace the connection if the files of the credentials have changed, and return whether it was replaced."""
        with self._renewing:
            files = self._place.read_files()
            if files == self._files:
                return False
            try:
                connection = self._place.connect()
            except ConfigError:
                # A token file or TLS file that is being replaced at this moment cannot be used, so the former
                # connection stays. The next call of `renew` reads the file again.
                return False
            former, self.connection, self._files = self.connection, connection, files
        former.close()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerOrder:
    """The order by which a trainer says to a follower which job to copy, from which daemon, and to which daemon.

    Attributes:
        job: the job.
        origin: the daemon that commits the job, from which the follower copies.
        holder: the daemon that gets the replica.
        held_as: the name of the replica at the holder, see paramserver/contract/replica_names.py; None: the name of the
            job.
        bytes_a_second: the most bytes that the follower sends in a second; None: there is no limit.
        finish_seconds: the most seconds for which the follower goes on copying after its standard input has ended.
    """

    job: str
    origin: DaemonPlace
    holder: DaemonPlace
    finish_seconds: float
    held_as: str | None = None
    bytes_a_second: int | None = None

    def to_json(self) -> str:
        """Return the order as the line of JSON that the trainer writes to the follower's standard input."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the order that `to_json` has written as `line`."""
        values = json.loads(line)
        return cls(**values | {name: DaemonPlace(**values[name]) for name in ("origin", "holder")})


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerState:
    """The progress of a follower.

    Attributes:
        step: the newest step that this follower has copied to the holder; None: it has copied no step yet.
        sent_bytes: the bytes that the follower has sent since its start.
        copy_seconds: how long the copy of the last step took.
        problem: why the last attempt to copy or to watch the commits failed; "": it did not fail.
    """

    step: int | None = None
    sent_bytes: int = 0
    copy_seconds: float = 0.0
    problem: str = ""


class Follower:
    """Keeps the replica of one job at one holder. `run` copies on the calling thread, until `finish` is called.

    Attributes:
        state: the progress of the follower; the lock of `_changed` guards it.
    """

    def __init__(self, order: FollowerOrder, tell: Callable[[FollowerState], None]) -> None:
        """Prepare a follower; `tell` is called after each change of `state`. It can raise ConfigError."""
        self.state = FollowerState()
        self._order = order
        self._tell = tell
        self._origin = _FollowedDaemon(order.origin)
        self._holder = _FollowedDaemon(order.holder)
        self._changed = threading.Condition()
        # The number of the newest settled step that the origin has reported to the watching thread. Before the follower
        # ends, it asks the origin for this number once more, because the report may be old.
        self._newest: int | None = None
        self._finish_at: float | None = None
        self._watching = Call(_GONE_SECONDS, _GONE_SECONDS)
        self._put_run = self._new_put_run()

    def _new_put_run(self) -> PutRun:
        # No other program uses a replica that has a name of its own (`held_as`). So if the job was rolled back, the
        # follower may give up the replica's steps that the job no longer has.
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
        """Copy steps until `finish` was called and the holder has the newest step, or cannot get it any more."""
        # The first copy may take long, so the follower reports to the origin before it: the origin then shows that
        # there is no replica yet.
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
        """Connect anew to each daemon whose credentials have changed in their files.

        An operator may have replaced the files while the follower ran, so that a daemon refuses the former credentials.
        """
        self._origin.renew()
        if self._holder.renew():
            self._put_run = self._new_put_run()

    def _watch(self) -> None:
        """Watch the commits of the job at the origin, and wake `run` at each one. This runs on a thread of its own."""
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
                    # The thread of `run` may have replaced and closed the connection to the origin, which has caused
                    # this error. Then the origin is well, so the watch goes on with the new connection.
                    if origin is not self._origin.connection or self._origin.renew():
                        continue
                    # The origin may be started again, so its commits are watched again after each failure. A failed
                    # attempt does not end the follower, because a copy that is under way waits longer for a daemon than
                    # one attempt to watch.
                    self._tell_problem(f"the commits at {self._order.origin.address} cannot be watched: {error}")
                    self._watching.extend()
                    self._watching.pause(_FIRST_PAUSE_SECONDS)

    def _wait_for_a_step(self) -> bool:
        """Wait until the origin has a newer step than the holder, and return True; False once the follower must end."""
        while True:
            with self._changed:
                if self._newest is not None and self._newest != self.state.step:
                    return True
                if self._finish_at is not None:
                    break
                is_changed = self._changed.wait(_REPORT_SECONDS)
            if not is_changed:
                self._report()
        # The origin may not have told the watching thread of the last commit yet, so the origin is asked before the
        # follower ends.
        newest = self._ask_newest()
        return newest is not None and newest != self.state.step

    def _ask_newest(self) -> int | None:
        """Return the newest settled step of the job at the origin; None if it has none or does not answer."""
        try:
            job = self._ask_job()
        except (StoreError, OSError):
            return None
        return None if job is None else job.step

    def _still_has(self, layout: str, step: int) -> bool:
        """Return whether the origin has a step of a layout, settled or not. It can raise StoreError."""
        job = self._ask_job()
        return job is not None and any(step in one.steps for one in job.layouts if one.name == layout)

    def _ask_rolled_back(self) -> RollBacks:
        """Return the roll-backs that operators have made of the job. It can raise StoreError."""
        with DaemonStep(self._origin.connection, self._order.job) as newest:
            named = rolled_back.of_states(newest.description.client_states)
        job = self._ask_job()
        return {**named, **rolled_back.of_layouts(() if job is None else job.layouts)}

    def _ask_job(self) -> StoredJob | None:
        """Return the origin's description of the job; None if the origin has no such job. It can raise StoreError."""
        call = Call(_GONE_SECONDS, _GONE_SECONDS)
        jobs = StoreClientSync(self._origin.connection).list_jobs(timeout=call)
        return next((job for job in jobs if job.name == self._order.job), None)

    def _copy(self) -> None:
        """Copy the newest settled step from the origin to the holder. It can raise TrainerClientError."""
        if not self._put_run.sessions:
            # The holder must answer before the follower opens a step at the origin. So while the holder does not
            # answer, the follower holds no step, and when it answers again, the newest step is copied.
            self._holder.connection.session(Call(_ANSWER_SECONDS, _ANSWER_SECONDS))
        with self._changed:
            heard = self._newest
        with DaemonStep(self._origin.connection, self._order.job, put_as=self._order.held_as) as source:
            step = source.description
            # When a run of puts begins anew, the digests of all slabs are compared, and not only the versions. That is
            # needed after the trainer has ended, because another run of the job may have gone back to an older step and
            # given versions other bytes. It is also needed if the step is older than the one that was copied last, as
            # after a restart of the daemon.
            is_older = self.state.step is not None and step.step.step < self.state.step
            if self._finish_at is not None or is_older or not self._put_run.takes(step):
                self._put_run.close()
            result = self._put_run.put(source)
        with self._changed:
            # The daemon tells its watchers of commits, but not of roll-backs. So if `_newest` has not changed during
            # the copy, the step that was opened is the newest one, even if its number is lower: the job was rolled
            # back.
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
        """Return whether a failed copy is not tried again.

        That is so after the trainer has ended, if the time of `finish_seconds` is over or the origin has no step or
        does not answer.
        """
        with self._changed:
            finish_at = self._finish_at
        return finish_at is not None and (time.monotonic() >= finish_at or self._ask_newest() is None)

    def _tell_problem(self, problem: str) -> None:
        with self._changed:
            self.state = replace(self.state, problem=problem)
            self._tell(self.state)
            is_finishing = self._finish_at is not None
        # After the trainer has ended, another run may have opened the job, and the daemon shows the replicas of the
        # last run. So this follower, which belongs to the former run, no longer reports problems.
        if not is_finishing:
            self._report()

    def _report(self) -> None:
        """Report the follower's state to the origin, which shows it to operators.

        A failure is ignored, because the next report follows soon.
        """
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
    """Read the order from standard input, and copy the job's steps until standard input has ended."""
    os.nice(_NICE)
    order = FollowerOrder.from_json(sys.stdin.readline())
    follower = Follower(order, _print)

    def until_the_trainer_is_gone() -> None:
        sys.stdin.read()
        follower.finish()
        # After `finish_seconds` the process ends even if `run` still waits for a daemon that does not answer. That does
        # no harm, because the holder keeps nothing of an unfinished step.
        time.sleep(order.finish_seconds)
        os._exit(1)

    threading.Thread(target=until_the_trainer_is_gone, name="follower-stdin", daemon=True).start()
    follower.run()


def _print(state: FollowerState) -> None:
    # After the trainer was killed, no process reads from the pipe behind standard output, so the error is ignored.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(asdict(state)), flush=True)


if __name__ == "__main__":
    main()
