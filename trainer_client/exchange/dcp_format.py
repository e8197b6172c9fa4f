"""The export as torch.distributed.checkpoint: torch's own writer gets tensors that are read when needed.

torch's planner gets tensors on the meta device, which have no memory. This module's planner cuts the tensors into
chunks, and reads a chunk from the store when torch's writer asks for the chunk. This module must never hold more than
one chunk, and needs no process group.

torch.distributed.checkpoint takes 1 s to import, so only an export that writes this format imports this module.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from trainer_client.exchange.destination import Destination
from trainer_client.exchange.stored_model import ModelTensor, OptimizerStates, StoredModel, piece_numel

# The top-level keys of the checkpoint: under the first are the weights, under the second the optimizer states.
_MODEL, _OPTIMIZER = "model", "optimizer"
# The name under which torch's optimizers keep the count of a parameter's updates.
_COUNT = "step"
_UNFINISHED = ".tmp"


def write_dcp(
    model: StoredModel, tensors: Sequence[ModelTensor], optimizer: OptimizerStates | None, destination: Destination
) -> None:
    """Write `{"model": ..., "optimizer": ...}`, in which every tensor is named by the FQN of its parameter.

    The optimizer's part is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`. A tied tensor
    is written once, and its further names refer to the same bytes.
    """
    lazy: dict[str, ModelTensor] = {}
    weights = {tensor.name: _place(lazy, f"{_MODEL}.{tensor.name}", tensor) for tensor in tensors}
    state: dict[str, Any] = {_MODEL: weights}
    if optimizer is not None:
        state[_OPTIMIZER] = _optimizer_state(optimizer, lazy)
    aliases = {f"{_MODEL}.{alias}": f"{_MODEL}.{tensor.name}" for tensor in tensors for alias in tensor.aliases}
    planner = _LazyPlanner(model, lazy, aliases)
    # `per_thread_copy_ahead` is 0, because torch's writer would otherwise ask for further tensors before it has written
    # one, on a machine with a GPU. The planner reads all tensors into one buffer, so it can give out only one at a
    # time.
    writer = _AliasWriter(destination, aliases, sync_files=False, per_thread_copy_ahead=0)
    # The calls of planner and writer below do what torch.distributed.checkpoint.save does in one process. `save` itself
    # is not called, because it warns if there is no process group.
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def _optimizer_state(optimizer: OptimizerStates, lazy: dict[str, ModelTensor]) -> dict[str, Any]:
    """Return the optimizer's state dict with tensors on the meta device in place of the stored states.

    For each of these tensors, enter in `lazy` the stored tensor whose elements the planner reads later.
    """
    state: dict[str, dict[str, Any]] = {}
    for fqn, kinds in optimizer.states.items():
        state[fqn] = {kind: _place(lazy, f"{_OPTIMIZER}.state.{fqn}.{kind}", tensor) for kind, tensor in kinds.items()}
        if fqn in optimizer.counts:
            state[fqn][_COUNT] = torch.tensor(float(optimizer.counts[fqn]), dtype=torch.float32)
    return {"state": state, "param_groups": [dict(group) for group in optimizer.groups]}


def _place(lazy: dict[str, ModelTensor], key: str, tensor: ModelTensor) -> torch.Tensor:
    """Return a tensor on the meta device in place of `tensor`, and enter `tensor` in `lazy` to be read later."""
    lazy[key] = tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _LazyPlanner(DefaultSavePlanner):
    """A planner that cuts tensors of the meta device into chunks, and reads a chunk when the writer asks for it.

    Args:
        model: reads the tensors.
        lazy: the tensors whose elements are read from the store, by their keys in the checkpoint.
        aliases: for each further name of a tied tensor, the key under which the checkpoint has the tensor's bytes.
    """

    def __init__(self, model: StoredModel, lazy: Mapping[str, ModelTensor], aliases: Mapping[str, str]) -> None:
        super().__init__()
        self._model = model
        self._lazy = lazy
        self._aliases = aliases

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [cut for item in plan.items for cut in self._cut(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        entries = metadata.state_dict_metadata
        for alias, key in self._aliases.items():
            entries[alias] = entries[key]
            metadata.planner_data[alias] = (_MODEL, alias.removeprefix(f"{_MODEL}."))
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        tensor = self._lazy.get(write_item.index.fqn)
        if tensor is None:
            return super().resolve_data(write_item)
        # torch's writer keeps each tensor until its file is complete (`_write_files_from_queue` of torch 2.13). That
        # takes no further memory, because all tensors from the store share the read buffer of `model`. The writer
        # writes each tensor before it asks for the next one, so the next read may overwrite the buffer.
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        first = _first_element(tensor.shape, chunk.offsets)
        return self._model.read(tensor, first, math.prod(chunk.sizes)).view(chunk.sizes)

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        """Yield an item for each chunk of a tensor that is read from the store, and any other item as it is."""
        tensor = self._lazy.get(item.index.fqn)
        if tensor is None:
            yield item
            return
        assert item.tensor_data is not None
        for offsets, sizes in chunks_of(tensor.shape, piece_numel(tensor)):
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            yield dataclasses.replace(
                item,
                index=MetadataIndex(item.index.fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
            )


class _AliasWriter(FileSystemWriter):
    """torch's writer, which writes into an export's directory, and lists a tied tensor's bytes under all its names."""

    def __init__(self, destination: Destination, aliases: Mapping[str, str], **options: Any) -> None:
        super().__init__(destination.name, **options)
        self.fs = cast(Any, _DestinationFiles(destination))
        self._aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tied: dict[str, list[str]] = {}
        for alias, key in self._aliases.items():
            tied.setdefault(key, []).append(alias)
        further = [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))
            for written in results
            for result in written
            for alias in tied.get(result.index.fqn, ())
        ]
        super().finish(metadata, [*results, further])


class _DestinationFiles(FileSystemBase):
    """The files of an export's directory, as torch's writer opens them.

    torch's writer gives its last file a temporary name, and renames the file when it is complete. The destination
    renames the whole directory instead, so here the last file has its final name from the beginning.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = os.path.basename(os.fspath(path)).removesuffix(_UNFINISHED)  # noqa: PTH119
        with self._destination.create(name) as file:
            try:
                yield cast(io.IOBase, file)
            except RuntimeError as error:
                # If a write fails or is interrupted, torch.save raises another error, about the unfinished file. The
                # original error is its context, and tells the user the reason, so the original error is raised.
                if error.__context__ is not None:
                    raise error.__context__ from None
                raise

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing, because the destination makes its directory."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing, because the file has its final name already."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Do nothing, because the destination's directory has no files of former exports."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def chunks_of(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of boxes that cover a tensor; each is contiguous and has at most `most` elements."""
    if not shape or math.prod(shape) <= most:
        yield (0,) * len(shape), tuple(shape)
        return
    rest = tuple(shape[1:])
    row = math.prod(rest)
    if row <= most:
        rows = most // row
        for first in range(0, shape[0], rows):
            yield (first, *(0,) * len(rest)), (min(rows, shape[0] - first), *rest)
        return
    for index in range(shape[0]):
        for offsets, sizes in chunks_of(rest, most):
            yield (index, *offsets), (1, *sizes)


def _first_element(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the index, in the flattened tensor, of the first element of the box that begins at `offsets`."""
    place = 0
    for size, offset in zip(shape, offsets, strict=True):
        place = place * size + offset
    return place
