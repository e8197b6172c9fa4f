"""A rank's way to the store of its node: the process group, the device, and the daemon that serves the node's ranks.

This module owns the order in which ranks meet before they use a daemon. It must never leave a process group or a daemon
behind: the exit stacks that its callers pass close them. It must never take a process group or a daemon away from
another engine of this process either, so the engines that use each are counted.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import torch
import torch.distributed as dist

from paramserver.contract.launcher import end_with_launcher
from paramserver.contract.open_files import raise_limit
from trainer_client import comm
from trainer_client.base import device
from trainer_client.base.recorder import Recorder
from trainer_client.client.transport.channel import wait_until_serving
from trainer_client.client.transport.credentials import NO_CREDENTIALS, Credentials
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import LocalDaemonError
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.ranks.node_number import number_on_node
from trainer_client.training.run.local_daemon import local_address
from trainer_client.training.run.shared_daemon import share_daemon

_SERVING_SECONDS = 30.0
# The environment variable in which launchers such as torchrun give a rank its number on its node.
_NUMBER = "LOCAL_RANK"


class _JoinedGroup:
    """The process group that an engine of this process has joined, and the number of engines that use the group.

    The last engine that ends leaves the group.

    A group that the script has joined is the script's own, and is not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: dist.ProcessGroup | None = None
        self._users = 0

    def take_over(self) -> None:
        """Take note that an engine has joined the present group, so that `share` counts its users."""
        with self._lock:
            self._group, self._users = dist.group.WORLD, 0

    def share(self, processes: ExitStack) -> None:
        """Count the caller among the group's users until `processes` is closed; the last user leaves the group."""
        with self._lock:
            if self._group is None or dist.group.WORLD is not self._group:
                return
            self._users += 1
            processes.callback(self._leave, self._group)

    def _leave(self, group: dist.ProcessGroup) -> None:
        with self._lock:
            if group is not self._group:
                # The script has destroyed the process group that this engine had joined, and another engine has joined
                # a new group after that. `_users` counts the users of the new group, so it is not changed here.
                return
            self._users -= 1
            if self._users:
                return
            self._group = None
        if dist.group.WORLD is group:
            dist.destroy_process_group()

    def keep_in_child(self) -> None:
        """Never free the group in a forked child, because the group is the parent's."""
        if self._group is not None:
            comm.never_free(self._group)
            self._group = None


_joined = _JoinedGroup()
os.register_at_fork(after_in_child=_joined.keep_in_child)


def choose_device(settings: TrainingConfig) -> tuple[int, torch.device]:
    """Return this rank's number on its node, and its device, which is made the current one.

    All ranks of a process group must call this. If the launcher has not numbered the ranks of each node, they agree on
    LOCAL_RANK here, because the first rank of a node starts the node's daemon, and each rank has a device of its own.

    Raises:
        ConfigError: `paramserver.device` names no device of this machine, or there is none for this rank.
    """
    if _NUMBER not in os.environ and dist.is_initialized() and dist.get_world_size() > 1:
        os.environ[_NUMBER] = str(number_on_node())
    chosen = device.choose(settings.paramserver.device)
    device.use(chosen)
    return int(os.environ.get(_NUMBER, "0")), chosen


def join_processes(
    settings: TrainingConfig, required: bool | None, port: int, processes: ExitStack
) -> tuple[int, torch.device]:
    """Join the process group that the launcher has announced, and return (local rank, device).

    As with DeepSpeed, a process that no launcher has started makes a group of one rank, because programs such as the
    Trainer of transformers communicate within it.

    This also raises the process's limit of open files, because each rank that this one exchanges tensors with takes a
    socket, and binds the process to the `paramserver launch` that started it, if one did.

    Raises:
        ConfigError: as `choose_device` and `comm.init_distributed`; or the process group has one rank, and the launcher
            has started several.
    """
    raise_limit()
    end_with_launcher()
    is_launched = "RANK" in os.environ
    if not is_launched or _NUMBER in os.environ:
        # The process group is bound to a device, so the device is chosen before the group is joined. This is possible
        # only if the number of the rank on its node is known.
        choose_device(settings)
    if not dist.is_initialized() and (is_launched or required is not False):
        comm.join_if_possible(port=port, required=required, verbose=is_launched)
        _joined.take_over()
    _joined.share(processes)
    comm.require_launched_group()
    return choose_device(settings)


def join_ranks(
    settings: TrainingConfig,
    processes: tuple[bool | None, int] | None,
    resources: ExitStack,
    recorder: Recorder | None = None,
) -> tuple[int, Collectives]:
    """Join the other ranks, and return (local rank, collectives), which `resources` closes. All ranks must call this.

    Args:
        processes: the arguments `required` and `port` of `join_processes`. None: the process group is used as it is.
        recorder: records the times that this rank waits for other ranks; None: the collectives make a recorder.

    Raises:
        ConfigError: as `join_processes`.
    """
    local_rank, chosen = (
        choose_device(settings) if processes is None else join_processes(settings, *processes, resources)
    )
    collectives = Collectives(chosen, settings.paramserver.collective_timeout_seconds, recorder)
    resources.callback(collectives.close)
    return local_rank, collectives


def find_store(
    settings: TrainingConfig, collectives: Collectives, local_rank: int, resources: ExitStack
) -> tuple[str, Credentials]:
    """Return address and credentials of the operator's daemon, or of the daemon that the node's first rank starts.

    All ranks must call this. It returns when the daemon serves.

    Raises:
        LocalDaemonError: the daemon cannot be started.
        StoreUnavailableError: the operator's daemon does not answer.
    """
    address = settings.store_address(os.environ)
    # The daemon that the job starts itself asks for no credentials. The config's credentials are then for the daemons
    # on other nodes that hold replicas, so without replicas no credentials are needed.
    is_alone = address is None and not settings.paramserver.replicas
    credentials = NO_CREDENTIALS if is_alone else settings.credentials(os.environ)
    if address is None:
        failure: LocalDaemonError | None = None
        if local_rank == 0:
            try:
                resources.callback(share_daemon(settings).leave)
            except LocalDaemonError as error:
                failure = error
        # The other ranks of the node connect to the daemon only after this collective. Before the daemon serves, the
        # socket of an earlier daemon may still be at its address.
        failed_somewhere = any(collectives.any_rank([failure is not None]))
        if failure is not None:
            raise failure
        if failed_somewhere:
            raise LocalDaemonError("the rank that starts a node's store daemon has failed: see its message")
        address = local_address(settings.state_dir())
    wait_until_serving(address, _SERVING_SECONDS, credentials, is_loud=local_rank == 0)
    return address, credentials
