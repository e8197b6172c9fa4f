"""The export as a file such as DeepSpeed's zero_to_fp32.py makes: an fp32 state dict, as `torch.save` writes it.

`torch.save` needs all tensors of a file in memory, so this module writes the format itself, piece by piece: a zip
archive without compression that has the pickled state dict, in which each tensor names a record, and the bytes of the
records (https://docs.pytorch.org/docs/stable/notes/serialization.html). This module must never write what `torch.load`
with `weights_only=True` refuses.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch._utils import _rebuild_tensor_v2

from trainer_client.client.store_client.types import bytes_of
from trainer_client.errors import ExportError
from trainer_client.exchange.destination import Destination
from trainer_client.exchange.sharded import write_sharded
from trainer_client.exchange.stored_model import ModelTensor, StoredModel

# The class that stands for each dtype in a file of torch.save, whose pickled state dict names dtypes by classes.
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
_PICKLE_PROTOCOL = 2
_FORMAT_VERSION = "3\n"
# Records begin at multiples of this number of bytes, as in files of `torch.save`, so that they can be mapped.
_ALIGNMENT_BYTES = 64
# An entry of a zip file has a header of _ENTRY_HEADER_BYTES before its name. With 64-bit sizes, it also has an extra
# field of _LARGE_SIZES_BYTES behind the name.
_ENTRY_HEADER_BYTES = 30
_LARGE_SIZES_BYTES = 20
# torch pads an entry of a zip file with an extra field that is marked by these two letters, so an export does, too.
_PADDING_FIELD = struct.unpack("<H", b"FB")[0]


@dataclass(frozen=True, slots=True)
class _FileRecord:
    """A record of the archive, which has the bytes of a tensor. The pickler writes it as torch writes a storage."""

    key: str
    tensor: ModelTensor


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the state dict. The pickler writes it as torch writes a tensor."""

    record: _FileRecord


class _StateDictPickler(pickle.Pickler):
    """A pickler that writes `_Entry` and `_FileRecord` as torch's pickler writes tensors and their storages."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _FileRecord):
            return ("storage", _STORAGES[obj.tensor.dtype], obj.key, "cpu", obj.tensor.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Entry):
            shape = obj.record.tensor.shape
            return _rebuild_tensor_v2, (obj.record, 0, shape, _strides(shape), False, OrderedDict())
        return NotImplemented


def write_fp32(
    model: StoredModel, tensors: Sequence[ModelTensor], destination: Destination, max_shard_bytes: int
) -> None:
    """Write tensors as `pytorch_model.bin`, or as numbered files with an index, under all names of tied tensors.

    Raises:
        ExportError: the format cannot have a tensor, which the message names.
    """
    for tensor in tensors:
        if tensor.dtype not in _STORAGES:
            raise ExportError(f"a file of torch.save cannot have tensor {tensor.name!r} of {tensor.dtype}")

    def write_file(name: str, shard: Sequence[ModelTensor]) -> None:
        # The directory within the archive has the name that torch.save gives it: the file's name without the suffix.
        directory = name.removesuffix(".bin")
        with destination.create(name) as file, ZipFile(file, "w", ZIP_STORED) as archive:
            records = [_FileRecord(str(number), tensor) for number, tensor in enumerate(shard)]
            _write_record(archive, file, f"{directory}/data.pkl", _pickled(records))
            _write_record(archive, file, f"{directory}/byteorder", sys.byteorder.encode())
            for record in records:
                with _open_record(archive, file, f"{directory}/data/{record.key}", record.tensor.nbytes) as opened:
                    for piece in model.pieces(record.tensor):
                        opened.write(bytes_of(piece).numpy().data)
            _write_record(archive, file, f"{directory}/version", _FORMAT_VERSION.encode())

    write_sharded(tensors, destination, max_shard_bytes, "pytorch_model", ".bin", write_file, with_aliases=True)


def _pickled(records: Sequence[_FileRecord]) -> bytes:
    """Return the pickled state dict. Tied names refer to the same record, so that torch.load ties them, too."""
    state = {name: _Entry(record) for record in records for name in (record.tensor.name, *record.tensor.aliases)}
    pickled = io.BytesIO()
    _StateDictPickler(pickled, protocol=_PICKLE_PROTOCOL).dump(state)
    return pickled.getvalue()


def _write_record(archive: ZipFile, file: IO[bytes], name: str, content: bytes) -> None:
    with _open_record(archive, file, name, len(content)) as record:
        record.write(content)


def _open_record(archive: ZipFile, file: IO[bytes], name: str, size_bytes: int) -> IO[bytes]:
    """Open an entry of the archive for writing, padded so that its bytes begin at a multiple of _ALIGNMENT_BYTES."""
    entry = ZipInfo(name)
    entry.file_size = size_bytes
    begin = file.tell() + _ENTRY_HEADER_BYTES + len(name.encode()) + _LARGE_SIZES_BYTES + struct.calcsize("<HH")
    padding = -begin % _ALIGNMENT_BYTES
    entry.extra = struct.pack("<HH", _PADDING_FIELD, padding) + b"Z" * padding
    return archive.open(entry, "w", force_zip64=True)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
