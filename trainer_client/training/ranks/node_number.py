"""The number of a rank on its node, for launchers that do not give it, such as torch.multiprocessing.spawn."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from trainer_client.training.ranks.host_group import host_group

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/ns/mnt")


def number_on_node() -> int:
    """Return how many ranks with smaller numbers are on this rank's node. All ranks must call this.

    Ranks count as on one node if they have the same boot id of the kernel and the same mount namespace. Such ranks see
    the same files, so they can use the socket of one daemon. Two containers of one machine have different namespaces.
    """
    place = f"{_BOOT_ID.read_text().strip()} {_MOUNTS.readlink()}"
    places: list[str | None] = [None] * dist.get_world_size()
    with host_group() as group:
        dist.all_gather_object(places, place, group=group)
    return places[: dist.get_rank()].count(place)
