"""The replicas of a job: which daemons hold them, and the followers that a rank has for them.

The first rank of a store starts a follower process for each replica of that store's part (trainer_client/copying/
follow.py), reads which step the follower has copied, and starts the follower again if it has ended. This module owns
these processes. It must never copy a byte itself, and must never hold up a training step unless `durability` is
`replicated`.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import grpc

from trainer_client.base.log_context import carried
from trainer_client.client.store_client.connection import Call, Connection
from trainer_client.client.transport.channel import CONTROL_DEADLINE_SECONDS
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import ConfigError, StoreUnavailableError, TrainerClientError

log = logging.getLogger(__name__)

# The flag with which Python starts the follower. With -P or -I, Python does not put the directory of the program in
# front of the module path; see local_daemon.py.
_PATH_FLAG = "-I" if sys.flags.isolated else "-P"
_PROGRAM = Path(__file__).parents[2] / "copying" / "follow.py"
_RESTART_SECONDS = 5.0
# While a thread waits for a replica, it calls `check` once in this many seconds. `check` may end the wait by an error.
_LOOK_SECONDS = 0.5


def choose_holders(
    addresses: Sequence[str], replicas: int, own_epoch: str, credentials: Credentials, *, is_ring: bool
) -> list[str]:
    """Return the addresses of the daemons that get the replicas: the first ones that are not the job's own daemon.

    With `is_ring` the holders are the daemons that follow the own daemon in the list, and the first address follows the
    last one. So the replicas of a job whose parts are on several daemons are spread over these daemons. Daemons that
    answer come before those that do not.

    Raises:
        ConfigError: there are fewer daemons than replicas.
    """
    epochs = {address: _epoch_of(address, credentials) for address in addresses}
    ring = list(epochs)
    own = next((place for place, address in enumerate(ring) if epochs[address] == own_epoch), 0)
    ring = [*ring[own:], *ring[:own]] if is_ring else ring
    # Maps the epoch of each chosen daemon to its address. Two addresses may lead to one daemon, which can hold only one
    # replica of a job. An address that does not answer may lead to any daemon, so it counts as a daemon of its own.
    found: dict[str, str] = {}
    for address in ring:
        if epochs[address] != own_epoch:
            found.setdefault(epochs[address] or address, address)
    others = list(found.values())
    if len(others) < replicas:
        raise ConfigError(
            f"paramserver.replicas = {replicas}: replica.addresses ({', '.join(addresses)}) names {len(others)} "
            "daemons besides the job's own; name daemons on other nodes"
        )
    return sorted(others, key=lambda address: epochs[address] is None)[:replicas]


def _epoch_of(address: str, credentials: Credentials) -> str | None:
    """Return the random name of a daemon's start; None if the daemon does not answer and so is not the job's own.

    The daemon is asked once only, because the follower goes on asking a holder that does not answer.
    """
    connection = Connection(address, f"trainer at {socket.gethostname()}", credentials, prefer_streams=False)
    try:
        connection.session(Call(None, CONTROL_DEADLINE_SECONDS))
        return connection.epoch
    except ConfigError:
        raise
    except TrainerClientError as error:
        log.warning("the daemon at %s, which may hold a replica, does not answer: %s", address, error)
        return None
    finally:
        connection.close()


class FollowerProcess:
    """One follower process, and the step that it has copied. The process is started again whenever it ends by itself.

    Attributes:
        holder: address of the daemon that gets the replica.
    """

    def __init__(self, order: str, holder: str) -> None:
        """Start the follower, which reads from the line `order` which job it copies, and where to."""
        self.holder = holder
        self._order = order
        self._changed = threading.Condition()
        self._step: int | None = None
        self._problem = ""
        self._stopping = False
        self._is_left = False
        self._process = self._start()
        threading.Thread(target=carried(self._listen), name="paramserver-follower", daemon=True).start()

    def wait(self, step: int, timeout_seconds: float, check: Callable[[], None]) -> None:
        """Wait until the holder has a step, or `stop_waiting` is called.

        Args:
            step: the number of the step.
            timeout_seconds: how long this waits.
            check: called again and again during the wait. An error that it raises ends the wait.

        Raises:
            StoreUnavailableError: the holder does not have the step in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._is_there(step, min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            check()
            if time.monotonic() >= deadline:
                raise StoreUnavailableError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"step {step} is committed, but after {timeout_seconds:.0f} s the daemon at {self.holder} does not "
                    f"hold it ({self._problem or 'the copy is under way'}): start that daemon, or set "
                    'paramserver.durability to "step" to train on without it',
                )

    def _is_there(self, step: int, seconds: float) -> bool:
        """Wait until the holder has a step or `stop_waiting` is called, and return whether one of them is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has(step) or self._is_left, seconds)

    def stop_waiting(self) -> None:
        """Have each present and later `wait` return at once, though the holder may lack the step."""
        with self._changed:
            self._is_left = True
            self._changed.notify_all()

    def catch_up(self, step: int, timeout_seconds: float) -> None:
        """Wait until the holder has a step or the follower reports a problem. Log a warning if the step is missing."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(step) or bool(self._problem), timeout_seconds)
            if not self._has(step):
                log.warning(
                    "the replica at %s has step %s, and step %d is committed: %s",
                    self.holder,
                    self._step,
                    step,
                    self._problem or "the follower goes on if the daemon that it copies from does",
                )

    def stop(self) -> None:
        """Let the follower end, and do not wait for its end. The follower still copies the newest step if it can."""
        with self._changed:
            self._stopping = True
            self._close_stdin()

    def _has(self, step: int) -> bool:
        return self._step is not None and self._step >= step

    def _start(self) -> subprocess.Popen[str]:
        # The follower is started in a session of its own, so that Ctrl-C and the end of a launcher do not reach it.
        process = subprocess.Popen(
            [sys.executable, _PATH_FLAG, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        # If the follower has ended already, writing to it raises BrokenPipeError. The error is ignored, because the
        # thread that listens to the follower starts another one.
        with suppress(BrokenPipeError):
            process.stdin.write(f"{self._order}\n")
            process.stdin.flush()
        return process

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _listen(self) -> None:
        """Take note of what the follower reports, and start another follower when this one has ended."""
        while True:
            process = self._process
            assert process.stdout is not None
            for line in process.stdout:
                # A follower that is killed may leave an unfinished line, which is no JSON and is ignored.
                with suppress(ValueError):
                    self._note(json.loads(line))
            code = process.wait()
            process.stdout.close()
            with self._changed:
                if self._stopping:
                    return
                self._close_stdin()
                self._say(f"the follower ended with {code}", "starting it again")
                while self._process is process:
                    if self._changed.wait_for(lambda: self._stopping, _RESTART_SECONDS):
                        return
                    try:
                        self._process = self._start()
                    except OSError as error:
                        # The follower may have been killed for want of memory, and there may still be too little memory
                        # to start another one. So the start is tried again later.
                        self._say(f"the follower cannot be started: {error}", "trying again")

    def _say(self, problem: str, remedy: str) -> None:
        """Log why the replica gets no steps, and wake the threads that wait for a step, so that they see this."""
        if problem == self._problem:
            return
        self._problem = problem
        self._changed.notify_all()
        log.warning("the replica at %s gets no steps, because %s; %s", self.holder, problem, remedy)

    def _note(self, state: dict[str, object]) -> None:
        step, problem = state["step"], str(state["problem"])
        with self._changed:
            self._step = step if isinstance(step, int) else self._step
            if problem and not self._problem:
                log.warning("the replica at %s gets no steps, and the follower tries again: %s", self.holder, problem)
            elif self._problem and not problem:
                log.warning("the replica at %s gets steps again, and has step %s", self.holder, step)
            self._problem = problem
            self._changed.notify_all()


class Followers:
    """The followers that this rank has started. Only the first rank of a store has any.

    Attributes:
        are_waited_for: whether the next commit begins only when all replicas have the last one (`replicated`).
    """

    def __init__(self, followers: Sequence[FollowerProcess], *, are_waited_for: bool, timeout_seconds: float) -> None:
        """Take over followers that run already.

        Args:
            followers: one for each replica.
            are_waited_for: whether the next commit begins only when all replicas have the last one.
            timeout_seconds: how long a commit, or the end of the run, waits for the followers.
        """
        self.are_waited_for = are_waited_for
        self._followers = followers
        self._timeout_seconds = timeout_seconds
        self._committed: int | None = None

    def note_commit(self, step: int) -> None:
        """Record the newest settled step, for which `close` waits."""
        self._committed = step

    def wait(self, step: int, check: Callable[[], None]) -> None:
        """Wait until all replicas have a step. If `check`, which is called again and again, raises, the wait ends.

        Raises:
            StoreUnavailableError: a replica does not have the step in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        for follower in self._followers:
            follower.wait(step, max(0.0, deadline - time.monotonic()), check)

    def stop_waiting(self) -> None:
        """Have each present and later `wait` return at once, because the run ends."""
        for follower in self._followers:
            follower.stop_waiting()

    def close(self) -> None:
        """Wait until the followers without a problem have copied the last settled step, then let all of them end."""
        deadline = time.monotonic() + self._timeout_seconds
        for follower in self._followers:
            if self._committed is not None:
                follower.catch_up(self._committed, max(0.0, deadline - time.monotonic()))
            follower.stop()
