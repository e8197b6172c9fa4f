"""The store daemons that this process has started for its engines: one for each state directory, shared by count.

A program may have several engines that read one config: a policy and its reference, a generator and its critic, the
cell of a notebook that is run again. The first engine of a state directory starts the daemon, and the last one that
leaves stops it, in whatever order they leave. This module owns the count. It must never stop a daemon that an engine of
this process uses.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from pydantic import ByteSize

from paramserver.contract.sizes import shown_size
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import LocalDaemonError
from trainer_client.training.run.local_daemon import LocalDaemon

log = logging.getLogger(__name__)

# The keys of the config's section `paramserver` that are settings of the daemon. An engine cannot share a daemon if its
# config asks for more in one of them than the daemon has.
_BUDGETS = ("host_budget", "nvme_budget")


@dataclass(slots=True, kw_only=True)
class _Shared:
    """A daemon of this process, the config with which it was started, and the number of engines that use it."""

    daemon: LocalDaemon
    config: TrainingConfig
    users: int = 0


class _SharedDaemons:
    """Starts the daemons of this process and stops each after its last engine, by the paths of state directories."""

    def __init__(self) -> None:
        # A lock that is held while a daemon is started or stopped, so that an engine never gets a daemon that is about
        # to end.
        self._lock = threading.Lock()
        self._by_directory: dict[Path, _Shared] = {}

    def use(self, config: TrainingConfig) -> DaemonShare:
        directory = config.state_dir().resolve()
        with self._lock:
            shared = self._by_directory.get(directory)
            if shared is None:
                shared = self._by_directory[directory] = _Shared(daemon=LocalDaemon.of(config), config=config)
            else:
                _check(config, shared.config, directory)
                shared.daemon.ensure_running()
            shared.users += 1
        return DaemonShare(self, directory)

    def forget(self) -> None:
        """Forget the daemons in a forked child, because they belong to the parent and end with the parent."""
        self._lock = threading.Lock()
        self._by_directory = {}

    def leave(self, directory: Path) -> None:
        with self._lock:
            shared = self._by_directory[directory]
            shared.users -= 1
            if not shared.users:
                del self._by_directory[directory]
                shared.daemon.stop()


class DaemonShare:
    """One engine's use of a daemon of this process. The daemon runs at least until the engine calls `leave`."""

    def __init__(self, daemons: _SharedDaemons, directory: Path) -> None:
        self._daemons = daemons
        self._directory = directory
        self._has_left = False

    def leave(self) -> None:
        """End the engine's use of the daemon, which stops if no other engine of this process uses it. Idempotent."""
        if not self._has_left:
            self._has_left = True
            self._daemons.leave(self._directory)


_daemons = _SharedDaemons()
os.register_at_fork(after_in_child=_daemons.forget)


def share_daemon(config: TrainingConfig) -> DaemonShare:
    """Return a share of the daemon of the config's state directory, which is started if no engine uses it yet.

    Raises:
        LocalDaemonError: the daemon cannot be started; or it runs already, and the config asks for a larger budget than
            the daemon has.
    """
    return _daemons.use(config)


def _check(wanted: TrainingConfig, present: TrainingConfig, directory: Path) -> None:
    """Check that a daemon that was started with the config `present` has the budgets that `wanted` asks for.

    Raises:
        LocalDaemonError: the config of `wanted` has a larger budget than the daemon.
    """
    for key in _BUDGETS:
        given: ByteSize = getattr(wanted.paramserver, key)
        has: ByteSize = getattr(present.paramserver, key)
        if key not in wanted.paramserver.model_fields_set:
            continue
        if given > has:
            raise LocalDaemonError(
                f"paramserver.{key} is {shown_size(given)} in the config of this engine, and "
                f"{shown_size(has)} in that of an engine of this process that is open: both share the store "
                f"daemon of {directory}, which was started with {shown_size(has)}. Write the larger one in both, "
                "close the other engine first (engine.close()), or give one of them another paramserver.state_dir"
            )
        if given < has:
            log.warning(
                "paramserver.%s = %s has no effect: this engine shares the store daemon of %s with another engine of "
                "this process, and it has %s",
                *(key, shown_size(given), directory, shown_size(has)),
            )
    telemetry, others = wanted.paramserver.telemetry, present.paramserver.telemetry
    if telemetry is not None and (others is None or others.endpoint != telemetry.endpoint):
        log.warning(
            "paramserver.telemetry.endpoint = %s is not told to the store daemon of %s, which another engine of this "
            "process has started with %s; the engine's own spans go there",
            *(telemetry.endpoint, directory, "none" if others is None else others.endpoint),
        )
