"""The large buffers of this rank's model, which are in a slab, because the client state of a commit has no room.

This module owns the form of the slab: first 8 bytes with the length of the file that follows, then a file of
safetensors with the buffers by name, then zeros. The store takes the slab for fp32 elements, and keeps its bytes as
they are. This module must never keep a copy of a buffer: a slab has the values of the moment at which it was handed
over.

[Note: buffers that change] A commit has a new version of the slab only if a byte of the buffers has changed since the
version before. The digests of all large buffers show that (see digests.py), so a script may change buffers in any way.
The digests are computed at the beginning of a step, to find changes after the last step, and at the end of the step.
Masks and tables that never change are written once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import nn

from paramserver.contract import tiers
from paramserver.contract.buffer_names import name_buffers
from paramserver.contract.capabilities import LARGE_BUFFERS
from paramserver.contract.dtypes import WIRE_DTYPES
from paramserver.contract.kinds import PARAM
from paramserver.contract.limits import ELEMENT_ALIGNMENT
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.alignment import round_up
from trainer_client.base.device import CPU
from trainer_client.client.transport.journal import SlabName, Value
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.client.transport.shard_group_name import ShardGroupName
from trainer_client.training.model.buffers import give_buffers
from trainer_client.training.model.digests import digest_on_device, digest_on_host
from trainer_client.training.ranks.collectives import Collectives

log = logging.getLogger(__name__)

_LENGTH_BYTES = 8
_DTYPE = torch.float32


class LargeBuffers:
    """The large buffers of this rank's model: hands them to the store as one slab, and loads them from it.

    Args:
        model: the model.
        names: the names of the large buffers in the model's state dict.
        store: this rank's store.
        collectives: the collectives of this rank. All ranks must make this object at the same time.

    Attributes:
        names: the names of the buffers that the store keeps. There are none if the daemon of any rank is of a release
            that cannot store large buffers, or if any rank has no large buffers.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], store: RankStore, collectives: Collectives) -> None:
        self.names: Sequence[str] = tuple(names) if LARGE_BUFFERS in store.capabilities else ()
        self._model = model
        self._store = store
        self._rank = collectives.rank
        own = _packed(self._buffers()).numel() if self.names else 0
        # The number of elements of each rank's slab of large buffers, by rank.
        self._numels = collectives.gather_rows(torch.tensor([own]), "the sizes of large buffers").flatten().tolist()
        if not all(self._numels):
            self.names, self._numels = (), []
        # The digest of the value that the store has of each large buffer, by the buffer's name. A buffer with another
        # digest has changed, so it is written again.
        self._stored: Mapping[str, int] = {}
        self._has_other_form = False

    def to_parameters(self) -> list[pb.Parameter]:
        """Return an entry for each rank's slab, for the list of parameters in the declaration of the job."""
        return entries_of(self._numels)

    def to_groups(self) -> list[pb.ShardGroup]:
        """Return the shard group of this rank's slab, if the rank has one."""
        return [group_of(self._rank, self._numels[self._rank])] if self.names else []

    @property
    def form(self) -> list[Any]:
        """The sizes of all ranks' slabs, as a part of the job's layout; empty if there are no slabs.

        Two runs whose slabs have different sizes therefore have different layouts.
        """
        return [["large buffers", self._numels]] if self.names else []

    @property
    def _slab(self) -> SlabName:
        return SlabName(group=_group_name(self._rank, self._numels[self._rank]), kind=PARAM)

    def hand_over(self, step: int) -> None:
        """Hand the buffers' values over to the store as versions of the uncommitted `step`. It can raise StoreError."""
        if self.names:
            self._store.steps.put(self._values(), step, self._values)

    def flush(self, step: int) -> None:
        """Do what `hand_over` does, if a buffer has changed since the store got the buffers last.

        It can raise StoreError.
        """
        if not self.has_changes():
            return
        (value,) = self._values()
        if value.values.numel() != self._numels[self._rank]:
            if not self._has_other_form:
                self._has_other_form = True
                log.warning(
                    "%s: a buffer has another shape or dtype than at initialize(), so commits keep the former values "
                    "of these buffers, and a resume begins with them",
                    ", ".join(self.names),
                )
            return
        self._store.steps.put([value], step)
        self.note()

    def note(self) -> None:
        """Keep the digests of the buffers' values, so that `changed` finds later changes.

        The caller has seen to it that the store has these values, or gets them with the next commit.
        """
        self._stored = self._digests()

    def changed(self) -> set[str]:
        """Return the names of the buffers that have changed since `note`."""
        return {name for name, digest in self._digests().items() if self._stored.get(name) != digest}

    def has_changes(self) -> bool:
        """Return whether a buffer has changed since `note`."""
        return bool(self.changed())

    def load(self) -> None:
        """Read the slab of the store's newest step into the model's buffers. It can raise StoreError."""
        if not self.names:
            return
        with self._store.leases.holding(self._store.leases.acquire_read([self._slab], position=0)) as (leased,):
            found = unpacked(leased.data.view(_DTYPE).clone())
        self.take(found)

    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy `values` into the buffers of these names. Names or shapes that the model does not have are left out."""
        give_buffers(self._model, values)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: self._model.get_buffer(name).detach() for name in self.names}

    def _values(self) -> list[Value]:
        return [Value(slab=self._slab, dtype=_DTYPE, values=_packed(self._buffers()))]

    def _digests(self) -> dict[str, int]:
        return {name: _digest(buffer) for name, buffer in self._buffers().items()}


def can_store(buffer: torch.Tensor) -> bool:
    """Return whether `buffer` can be stored in a slab.

    Quantized, sparse and meta tensors have no plain bytes, and safetensors has no complex numbers of 16 bytes.
    """
    if buffer.is_quantized or buffer.is_meta or buffer.layout is not torch.strided:
        return False
    try:
        safetensors.torch.load(safetensors.torch.save({"": torch.empty(0, dtype=buffer.dtype, device=CPU)}))
    except KeyError:
        return False
    return True


def entries_of(numels: Iterable[int]) -> list[pb.Parameter]:
    """Return an entry for the slab of each rank, for the declaration of a job.

    Args:
        numels: the number of elements of each rank's slab.
    """
    return [
        pb.Parameter(fqn=name_buffers(rank), shape=[numel], dtype=WIRE_DTYPES[_DTYPE])
        for rank, numel in enumerate(numels)
    ]


def group_of(rank: int, numel: int) -> pb.ShardGroup:
    """Return the shard group of the slab of a rank, which has `numel` elements."""
    # Training never reads large buffers from the store; it only writes them when they have changed. So their tier is
    # NVMe, and the store keeps no copy of them in host memory.
    kind = pb.KindSpec(kind=PARAM, dtype=WIRE_DTYPES[_DTYPE], placement=tiers.NVME)
    shard = pb.Shard(fqn=name_buffers(rank), numel=numel)
    return pb.ShardGroup(name=_group_name(rank, numel), numel=numel, shards=[shard], kinds=[kind])


def planned_numel(buffers: Mapping[str, torch.Tensor]) -> int:
    """Return the number of elements that `_packed` would return for these buffers, without reading their values.

    The buffers, by name, may be on the meta device. It can raise KeyError: safetensors has no such dtype.
    """
    header, end = dict[str, Any](), 0
    # The loop takes the buffers in the order in which safetensors puts them into a file: those with the widest elements
    # first, and buffers of one width in the order of their names.
    for name, buffer in sorted(buffers.items(), key=lambda item: (-item[1].itemsize, item[0])):
        begin, end = end, end + buffer.nbytes
        empty = safetensors.torch.save({"": torch.empty(0, dtype=buffer.dtype, device=CPU)})
        header[name] = json.loads(empty[_LENGTH_BYTES:])[""] | {
            "shape": list(buffer.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return _numel_of(_LENGTH_BYTES + round_up(len(text), _LENGTH_BYTES) + end)


def unpacked(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the buffers that a slab has, by name and on the CPU. `words` [n], fp32, are the slab's elements."""
    content = words.view(torch.uint8).numpy()
    length = int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
    return safetensors.torch.load(content[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())


def _packed(buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the content of a slab with these buffers, as fp32 elements [n]: the opposite of `unpacked`."""
    # Each buffer is copied, because two buffers may share memory, which safetensors refuses.
    content = safetensors.torch.save({name: b.to(CPU, copy=True).contiguous() for name, b in buffers.items()})
    words = torch.zeros(_numel_of(len(content)), dtype=_DTYPE)
    target = words.view(torch.uint8).numpy()
    target[:_LENGTH_BYTES] = memoryview(len(content).to_bytes(_LENGTH_BYTES, "little"))
    target[_LENGTH_BYTES : _LENGTH_BYTES + len(content)] = memoryview(content)
    return words


def _numel_of(content_bytes: int) -> int:
    """Return the number of fp32 elements of a slab whose safetensors file has `content_bytes` bytes."""
    return round_up(-(-(_LENGTH_BYTES + content_bytes) // _DTYPE.itemsize), ELEMENT_ALIGNMENT)


def _group_name(rank: int, numel: int) -> str:
    return str(ShardGroupName(unit=name_buffers(rank), start=0, stop=numel))


def _digest(buffer: torch.Tensor) -> int:
    flat = buffer.contiguous().reshape(-1)
    if flat.device.type != CPU:
        # A buffer that is a view is copied, because a view may begin within a word of 4 bytes, and the digest on a
        # device reads whole words.
        return int(digest_on_device(flat.clone() if flat.storage_offset() else flat))
    content = flat.view(torch.uint8).numpy().data
    return digest_on_host(content, [slice(None)])
