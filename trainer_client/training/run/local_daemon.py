"""A store daemon that belongs to a process: a rank of the node, or `paramserver launch`. It stops with the process.

This module owns the daemon's process. The daemon's stdin is a pipe from this process, and it shuts down cleanly when
the pipe closes, however this process ends. This module must never kill the daemon before the daemon had time to finish
a commit that is under way.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO
from weakref import WeakSet

import grpc

from paramserver import v1
from paramserver.contract.disk_room import too_large
from paramserver.contract.durable_files import make_directory
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_pb_grpc
from trainer_client.base.log_context import carried
from trainer_client.client.transport.channel import check_address, is_serving, open_channel
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import LocalDaemonError, StoreUnavailableError

log = logging.getLogger(__name__)

# The path of the program that is started as the daemon. It is not started by its module name, because a module of the
# same name may lie in the working directory or on PYTHONPATH. See tests/integration/test_foreign_modules.py.
_PROGRAM = Path(v1.__file__).parents[1] / "__main__.py"
# The flag with which Python starts the daemon. With -P or -I, Python does not put the directory of the program in front
# of the module path. -I also ignores PYTHONPATH, and is used if this process was started with -I.
_PATH_FLAG = "-I" if sys.flags.isolated else "-P"

SOCKET_NAME = "paramserver.sock"
LOG_NAME = "daemon.log"
LOCK_NAME = "lock"
# The name of the only data file of a daemon without `nvme_dirs`.
_DATA_FILE = "data.0"

# The most seconds to wait until a started daemon serves. The daemon first allocates its whole arena, which takes some
# three minutes for 1 TiB (measured at 6 GB/s), and checks its catalog. The files in deploy allow the same time.
_START_SECONDS = 600.0
# The most seconds that a new daemon waits for the lock on the state directory while another daemon serves that
# directory. The other daemon may be that of a killed trainer, and may not have noticed the end of its trainer yet.
_PREDECESSOR_SECONDS = 20.0
# The most seconds that a new daemon waits for the lock on the state directory while the daemon that has the lock does
# not serve any more. The daemon of a killed trainer finishes a commit or a snapshot before it releases the lock.
_ENDING_SECONDS = 120.0
# After this many seconds of waiting for a daemon, the log says what the trainer waits for. A daemon with the default
# budget serves earlier, so the line does not appear for it.
_SILENT_SECONDS = 30.0
_POLL_SECONDS = 0.05
_PEERS_SECONDS = 10.0
_STOP_SECONDS = 60.0
_LOG_TAIL_LINES = 12

# Environment variables for the daemon, which hide all GPUs from it. The daemon computes on the CPU, and must never have
# a context on a GPU, because an error of the GPU would end the daemon.
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
# Environment variables of the trainer that the daemon does not get. With TORCH_CUDA_SANITIZER, torch looks for a GPU at
# each operation. NOTIFY_SOCKET names the service manager of the trainer, which would take the end of the daemon for the
# end of the trainer.
_NOT_FOR_DAEMONS = {"TORCH_CUDA_SANITIZER", "NOTIFY_SOCKET"}

# The pipes to the standard inputs of the daemons that this process has started. A forked child closes them.
_inputs: WeakSet[IO[bytes]] = WeakSet()


def _close_inputs() -> None:
    """Close the standard inputs of all daemons in a forked child, such as a worker of a data loader.

    A daemon stops when no process has its input open any more. So a child with an open input would keep the daemon from
    stopping.
    """
    for daemon_input in _inputs:
        daemon_input.close()


os.register_at_fork(after_in_child=_close_inputs)


def local_address(state_dir: Path) -> str:
    """Return the address of the daemon that belongs to the job with this state directory."""
    return check_address(f"unix:{state_dir.absolute() / SOCKET_NAME}")


def serve_command(options: Sequence[str]) -> list[str]:
    """Return the command that starts a daemon which stops when its standard input ends."""
    return [sys.executable, _PATH_FLAG, str(_PROGRAM), "serve", "--exit-with-stdin", *options]


def _wait_for_predecessor(state_dir: Path, address: str) -> None:
    """Wait until no other daemon has the state directory locked. The daemon of a killed trainer may, for a while.

    Raises:
        LocalDaemonError: the directory stays locked, or the other daemon goes on to serve at `address`.
    """
    path = state_dir / LOCK_NAME
    if not path.exists():
        return
    began, is_told = time.monotonic(), False
    with path.open("rb") as lock_file, open_channel(address) as channel:
        while True:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                # The lock is free, so the former daemon has ended. The shared lock that this call has taken is released
                # when the file is closed.
                return
            except BlockingIOError:
                waited_seconds = time.monotonic() - began
                if not is_told and waited_seconds > _SILENT_SECONDS:
                    log.warning(
                        "paramserver: waiting for the end of the store daemon (pid %s) of an earlier run, which still "
                        "uses %s",
                        *(_lock_holder(state_dir), state_dir),
                    )
                    is_told = True
                if waited_seconds > _PREDECESSOR_SECONDS and is_serving(channel, timeout_seconds=1.0):
                    raise LocalDaemonError(
                        f"another store daemon (pid {_lock_holder(state_dir)}) serves {state_dir}: to use it, set "
                        f"paramserver.address to {address!r} instead of the daemon's own keys; else choose another "
                        "paramserver.state_dir"
                    ) from None
                if waited_seconds > _ENDING_SECONDS:
                    raise LocalDaemonError(
                        f"another store daemon (pid {_lock_holder(state_dir)}) has {state_dir} locked, and has not "
                        f"served at {address} for {_ENDING_SECONDS:g} s: if it serves elsewhere, set "
                        f"paramserver.address to that; else look at {state_dir / LOG_NAME}, and start again when it "
                        "has ended"
                    ) from None
            time.sleep(_POLL_SECONDS)


def _lock_holder(state_dir: Path) -> str:
    """Return the pid of the last process that has locked the state directory; "" if there was none."""
    path = state_dir / LOCK_NAME
    return path.read_text().strip() if path.exists() else ""


def _how(code: int) -> str:
    """Return a text about the end of a process with the `returncode` `code`: "with exit code 1" or "by SIGKILL"."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _guess(code: int) -> str:
    """Return a text that says what may have ended a daemon that has left no message, from its `returncode`."""
    if code == -signal.SIGKILL:
        return (
            "it left no message. The kernel kills a process so when there is no memory left for it: lower host_budget, "
            "or raise the memory limit of this container or job"
        )
    return "it left no message: `paramserver serve` with the same state directory and budgets shows more"


def _make_state_directory(path: Path) -> None:
    """Make the directory, with access for this user only, unless it exists. Its parent must exist.

    Raises:
        LocalDaemonError: the parent does not exist, or the directory cannot be made.
    """
    keys = "correct paramserver.state_dir or zero_optimization.*.nvme_path, or the daemon's state_dir"
    try:
        if not path.parent.is_dir():
            raise LocalDaemonError(
                f"state directory {path} is not made, because {path.parent} does not exist, as where a disk is not "
                f"mounted: mount it, or run `mkdir -p {shlex.quote(str(path.parent))}`, or {keys}"
            )
        make_directory(path, mode=0o700)
    except OSError as error:
        raise LocalDaemonError(f"state directory {path} cannot be made ({error.strerror}): {keys}") from None


def _tell_of_full_disk(config: TrainingConfig, state_dir: Path) -> None:
    """Log a warning if the disk of the daemon's one data file has no room for the budget that the config writes."""
    section = config.paramserver
    if "nvme_budget" in section.model_fields_set:
        # If the state directory does not exist yet, the free space is that of the disk of its parent, which must exist.
        file = (state_dir if state_dir.is_dir() else state_dir.parent) / _DATA_FILE
        if (text := too_large("paramserver.nvme_budget", section.nvme_budget, [file])) is not None:
            log.warning("%s", text)


class LocalDaemon:
    """A daemon process of this program. The constructor starts the process, and returns when the daemon serves.

    Attributes:
        address: address of the daemon's socket.

    Raises:
        LocalDaemonError: the daemon stopped, for example because another one has the state directory, or did not serve
            in time; the message has the end of its log.
    """

    def __init__(
        self, state_dir: Path, options: Sequence[str], *, address: str | None = None, restarts: bool = True
    ) -> None:
        """Start a daemon.

        Args:
            state_dir: the daemon's state directory, which is made if its parent exists, with access for this user only.
            options: the options of `paramserver serve`, the state directory among them.
            address: the address of the socket that the options name; None: the socket in the state directory.
            restarts: whether the daemon is started again each time that it has ended by itself.
        """
        self._state_dir = state_dir.absolute()
        self.address = local_address(self._state_dir) if address is None else address
        _make_state_directory(self._state_dir)
        self._command = serve_command(options)
        self._stopping = False
        # The lock for `_process` and `_stopping`. It is held while an ended daemon process is replaced by a new one.
        self._starting = threading.Lock()
        self._process = self._start()
        if restarts:
            threading.Thread(target=carried(self._start_again), name="paramserver-daemon", daemon=True).start()

    @classmethod
    def of(cls, config: TrainingConfig) -> LocalDaemon:
        """Start the daemon of a job whose config names no daemon of an operator.

        It can raise LocalDaemonError, as the constructor.
        """
        state_dir = config.state_dir().absolute()
        _tell_of_full_disk(config, state_dir)
        options = [
            *("--state-dir", str(state_dir)),
            # The address of the socket is given by a flag, because an environment variable could name another socket.
            # The flag takes precedence over the variable.
            *("--socket", str(state_dir / SOCKET_NAME)),
            *("--host-budget", str(int(config.paramserver.host_budget))),
            *("--nvme-budget", str(int(config.paramserver.nvme_budget))),
        ]
        if config.paramserver.telemetry is not None:
            options += ["--otlp-endpoint", config.paramserver.telemetry.endpoint]
            # The config and the daemon accept a collector of telemetry on another machine only with `insecure`, so the
            # daemon gets this flag, too.
            options += ["--insecure"] if config.paramserver.insecure else []
        return cls(state_dir, options, restarts=config.paramserver.reattach_timeout_seconds > 0)

    def ensure_running(self) -> None:
        """Start the daemon again if it has ended by itself.

        Raises:
            LocalDaemonError: the daemon cannot be started, or its state directory has been removed.
        """
        with self._starting:
            if not self._stopping and self._process.poll() is not None:
                self._replace()
            elif _lock_holder(self._state_dir) != str(self._process.pid):
                raise LocalDaemonError(
                    f"{self._state_dir} was removed or replaced while an open engine of this process uses its store "
                    f"daemon (pid {self._process.pid}): close that engine (engine.close()) before you remove the "
                    "directory, or give this engine another paramserver.state_dir"
                )

    def _start_again(self) -> None:
        """Restart the daemon each time that it has ended by itself, because ranks wait for a new daemon."""
        while True:
            process = self._process
            process.wait()
            with self._starting:
                if self._stopping:
                    return
                if self._process is not process:
                    # `ensure_running` has started a new daemon already, so wait for the end of that one.
                    continue
                try:
                    self._replace()
                except (LocalDaemonError, OSError) as error:
                    log.error("the store daemon cannot be restarted: %s", error)
                    return

    def _replace(self) -> None:
        """Start a new daemon process in the place of the one that has ended. The caller holds `_starting`."""
        former = self._process
        log.warning("the store daemon (pid %d) ended with %d; restarting it", former.pid, former.returncode)
        self._close_stdin(former)
        self._process = self._start()

    def stop(self) -> None:
        """Wait until the other ranks of the node have left, then shut the daemon down.

        A repeated call has no effect.
        """
        with self._starting:
            self._stopping = True
        try:
            if self._process.poll() is None:
                self._wait_for_peers()
        finally:
            self._close_stdin(self._process)
        for signal_it in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_STOP_SECONDS)
                return
            except subprocess.TimeoutExpired:
                log.warning("store daemon (pid %d) has not stopped within %g s", self._process.pid, _STOP_SECONDS)
                signal_it()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            _wait_for_predecessor(self._state_dir, self.address)
            log_offset = self._log_size()
            # A daemon whose log is on a full disk writes the reason of its failed start to its standard output. That
            # output is a file in memory, because a pipe would need a thread that reads it for as long as the daemon
            # lives.
            with os.fdopen(os.memfd_create("paramserver-output"), "w+b") as output:
                process = self._spawn(output)
                try:
                    self._wait_until_serving(process, log_offset, output)
                except BaseException:
                    self._close_stdin(process)
                    raise
        except OSError as error:
            raise LocalDaemonError(
                f"no store daemon can be started in {self._state_dir} ({error.strerror}: {error.filename}): let this "
                "user write there, or choose another directory"
            ) from None
        return process

    def _spawn(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(self._state_dir / LOG_NAME, flags, 0o600), "ab") as log_file:
            # The daemon gets a session of its own, so that Ctrl-C reaches only the trainer, which then stops the daemon
            # itself. The pipe to the daemon's standard input has no buffer (`bufsize=0`), because another thread might
            # hold the lock of such a buffer when this process forks.
            process = subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=log_file,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_DAEMONS} | _WITHOUT_GPUS,
            )
        assert process.stdin is not None
        _inputs.add(process.stdin)
        return process

    def _wait_until_serving(self, process: subprocess.Popen[bytes], log_offset: int, output: IO[bytes]) -> None:
        began, is_told = time.monotonic(), False
        with open_channel(self.address) as channel:
            # Another trainer may have started a daemon in the same directory at the same time. If that daemon has the
            # lock on the directory, it answers at this address, and `process` is about to end. So it is also checked
            # that `process` has the lock.
            while not (is_serving(channel, timeout_seconds=1.0) and _lock_holder(self._state_dir) == str(process.pid)):
                if process.poll() is not None:
                    raise LocalDaemonError(
                        f"the store daemon stopped {_how(process.returncode)} (log: {self._state_dir / LOG_NAME}):\n"
                        f"{self._last_words(log_offset, output) or _guess(process.returncode)}"
                    )
                waited_seconds = time.monotonic() - began
                if not is_told and waited_seconds > _SILENT_SECONDS:
                    log.warning(
                        "paramserver: waiting for the store daemon (pid %d), which takes its host_budget and reads %s",
                        *(process.pid, self._state_dir),
                    )
                    is_told = True
                if waited_seconds > _START_SECONDS:
                    raise LocalDaemonError(
                        f"the store daemon (pid {process.pid}) does not serve after {_START_SECONDS:g} s, in which it "
                        f"takes host_budget and reads its catalog: look at {self._state_dir / LOG_NAME}, or lower "
                        "host_budget"
                    )
                time.sleep(_POLL_SECONDS)

    def _wait_for_peers(self) -> None:
        deadline = time.monotonic() + _PEERS_SECONDS
        # An error of this call means that the daemon or its directory is gone, and all sessions with it. So there are
        # no other ranks to wait for, and the error is ignored.
        with suppress(grpc.RpcError, StoreUnavailableError), open_channel(self.address) as channel:
            admin = admin_pb_grpc.StoreAdminStub(channel)
            while admin.GetTiers(admin_pb.GetTiersRequest(), timeout=5.0).sessions:
                if time.monotonic() > deadline:
                    log.warning("the store daemon is stopped although ranks of this node are attached to it")
                    return
                time.sleep(_POLL_SECONDS)

    @staticmethod
    def _close_stdin(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()

    def _log_size(self) -> int:
        path = self._state_dir / LOG_NAME
        return path.stat().st_size if path.exists() else 0

    def _last_words(self, log_offset: int, output: IO[bytes]) -> str:
        """Return the end of what a daemon wrote to its log from `log_offset` on, and to its standard output."""
        with (self._state_dir / LOG_NAME).open("rb") as log_file:
            log_file.seek(log_offset)
            output.seek(0)
            lines = (log_file.read() + output.read()).decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])
