"""Nodes with GPUs by name: their capacities and rates, as published or as measured on such machines.

A plan for such a node needs neither the node nor a probe. This module has the figures; docs/plan.md names their
sources. It must never measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainer_client.errors import ConfigError
from trainer_client.plan.layout import World
from trainer_client.plan.machine import Capacities, Rates, shared_rate

GB = 1e9
# The elements that one thread of a daemon updates in a second with AdamW, as measured on a machine with an H200 GPU.
_STORE_UPDATE = 0.41e9
# The bytes that an update of AdamW moves in memory for each element: three fp32 states are read and written, a gradient
# of 16 bits is read and a parameter of 16 bits is written.
UPDATE_BYTES = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node with its published figures; rates are bytes per second in one direction.

    Attributes:
        gpus: number of GPUs, each with a rank and a network interface.
        hbm, hbm_rate: bytes of one GPU's memory, and the rate of that memory.
        flops: floating-point operations in bf16 that a GPU has reached in training, per second.
        device_link: rate between host memory and one GPU, as measured on such machines.
        gpu_link: peak rate between one GPU and the other GPUs of the node.
        network: rate that collectives have reached on one network interface.
        host_memory, host_rate: bytes of host memory, and the peak rate of that memory.
        update: the most elements in a second that 16 threads of a store were measured to update on such a machine.
        devices: number of NVMe devices; `device_bytes`, `device_read`, `device_write` are of one of them.
    """

    gpus: int
    hbm: int
    hbm_rate: float
    flops: float
    device_link: float
    gpu_link: float
    network: float
    host_memory: int
    host_rate: float
    update: float
    devices: int
    device_bytes: int
    device_read: float
    device_write: float

    def rates(self, world: World, optimizer_threads: int) -> Rates:
        """Return the node's rates for a job on the ranks of `world`, if its store has this many optimizer threads."""
        read, write = self.devices * self.device_read, self.devices * self.device_write
        return Rates(
            copy=10 * GB,
            device_link=self.device_link,
            nvme_read=read,
            nvme_write=write,
            nvme_both=shared_rate(read, write),
            update=min(optimizer_threads * _STORE_UPDATE, self.update),
            device_update=self.hbm_rate / UPDATE_BYTES,
            collective=self.collective_rate(world),
            host_memory=self.host_rate,
        )

    def capacities(self) -> Capacities:
        """Return the bytes of GPU memory, host memory and NVMe that the node has for a job."""
        return Capacities(device=self.hbm, host=self.host_memory, nvme=self.devices * self.device_bytes, is_cpu=False)

    def collective_rate(self, world: World) -> float | None:
        """Return the bytes of a whole buffer that a rank gathers from all ranks in a second.

        Each GPU receives all parts but its own over the GPU links of its node. Each node receives the parts of other
        nodes over the network, through the interfaces of all its GPUs. Both transfers run at the same time, so the
        slower one counts.
        """
        if world.size == 1:
            return None
        within = (world.size - 1) / world.size / self.gpu_link
        between = (world.nodes - 1) / world.nodes / (self.network * world.ranks)
        return 1 / max(within, between)


_H100 = Node(
    gpus=8,
    hbm=int(80 * GB),
    hbm_rate=3350 * GB,
    flops=400e12,
    device_link=55 * GB,
    gpu_link=450 * GB,
    network=47 * GB,
    host_memory=int(2000 * GB),
    host_rate=2 * 8 * 38.4 * GB,
    update=3.3e9,
    devices=8,
    device_bytes=int(3840 * GB),
    device_read=6.5 * GB,
    device_write=3.5 * GB,
)
NODES: Mapping[str, Node] = {
    "h100x8": _H100,
    # A node like h100x8 with H200 GPUs, which have more memory than H100 GPUs and compute at the same rate.
    "h200x8": replace(_H100, hbm=int(141 * GB), hbm_rate=4800 * GB, update=2.2e9),
}


def find_node(name: str) -> Node:
    """Return the node of this name.

    Raises:
        ConfigError: there is no node of this name.
    """
    if name not in NODES:
        raise ConfigError(f"--node {name}: known are {', '.join(NODES)}; for others give their rates as options")
    return NODES[name]
