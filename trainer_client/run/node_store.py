"""A rank's way to the store of its node: the process group, the device, and the daemon that serves the node's ranks.

This module owns the order in which ranks meet before they use a daemon. It must never leave a process group or a daemon
behind: the exit stacks that its callers pass close them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
import torch.distributed as dist

from paramserver.contract.open_files import raise_limit
from trainer_client import comm, device
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import LocalDaemonError
from trainer_client.ranks.collectives import Collectives
from trainer_client.run.local_daemon import LocalDaemon, local_address
from trainer_client.transport.channel import wait_until_serving
from trainer_client.transport.credentials import NO_CREDENTIALS, Credentials

_SERVING_SECONDS = 30.0


def choose_device(settings: TrainingConfig) -> tuple[int, torch.device]:
    """Return this rank's number on its node, and its device, which is made the current one.

    Raises:
        ConfigError: `paramserver.device` means no device, or none of them is this rank's.
    """
    chosen = device.choose(settings.paramserver.device)
    device.use(chosen)
    return int(os.environ.get("LOCAL_RANK", "0")), chosen


def join_processes(
    settings: TrainingConfig, required: bool | None, port: int, processes: ExitStack
) -> tuple[int, torch.device]:
    """Join the process group that the launcher has announced, if any. Return (local rank, device).

    This also raises the process's limit of open files, because each rank that this one exchanges tensors with takes a
    socket.

    Raises:
        ConfigError: as `choose_device` and `comm.init_distributed`; the process group has one rank, and the launcher
            has started several.
    """
    raise_limit()
    local_rank, chosen = choose_device(settings)
    launched = "RANK" in os.environ
    if not dist.is_initialized() and (launched or required):
        comm.init_distributed(distributed_port=port, dist_init_required=required)
        processes.callback(dist.destroy_process_group)
    if dist.is_initialized():
        comm.require_launched_group()
    return local_rank, chosen


def find_store(
    settings: TrainingConfig, collectives: Collectives, local_rank: int, resources: ExitStack
) -> tuple[str, Credentials]:
    """Return the address and credentials of the operator's daemon, or of one that the node's first rank starts.

    All ranks must call this. Return when the daemon serves.

    Raises:
        LocalDaemonError: the daemon cannot be started.
        StoreUnavailableError: the operator's daemon does not answer.
    """
    address = settings.store_address(os.environ)
    # The job's own daemon asks for no credentials. Those of the config are for daemons on other nodes then.
    is_alone = address is None and not settings.paramserver.replicas
    credentials = NO_CREDENTIALS if is_alone else settings.credentials(os.environ)
    if address is None:
        failure: LocalDaemonError | None = None
        if local_rank == 0:
            try:
                resources.callback(LocalDaemon.of(settings).stop)
            except LocalDaemonError as error:
                failure = error
        # The other ranks connect only after this collective, because the socket of an earlier daemon may have been
        # there until now.
        failed_somewhere = any(collectives.any_rank([failure is not None]))
        if failure is not None:
            raise failure
        if failed_somewhere:
            raise LocalDaemonError("the rank that starts a node's store daemon has failed: see its message")
        address = local_address(settings.state_dir())
    wait_until_serving(address, _SERVING_SECONDS, credentials)
    return address, credentials
