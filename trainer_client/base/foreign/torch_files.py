"""Files of `torch.save`, opened without trust: nothing in them is called, and tensors are mapped and not read.

A file of torch.save is a zip archive without compression: a pickle, and a record for the bytes of each storage.
torch_archive.py reads the archive, plain_pickle.py the pickle, and this module makes tensors of what both say. It knows
the functions that torch.save names for tensors and for simple values, and refuses every other name, before it makes the
first object. This module must never call `torch.load`, whose restricted reader calls functions while it reads, some of
which take any amount of memory, and reads the archive in its own way.
"""

from __future__ import annotations

import io
import math
import mmap
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_client.base.foreign import plain_pickle
from trainer_client.base.foreign.files import open_regular
from trainer_client.base.foreign.plain_pickle import Made, Name, Outside
from trainer_client.base.foreign.torch_archive import Record, TorchArchive, damaged
from trainer_client.errors import ImportCheckpointError

# The most bytes of the pickle in a file of torch.save. The pickle has names and shapes only: about 300 bytes for each
# tensor.
_MAX_PICKLE_BYTES = 512 << 20
_MOST_DIMENSIONS = 64
_MAX_SIZE = (1 << 63) - 1
_PICKLE, _BYTE_ORDER, _DATA = "data.pkl", "byteorder", "data/"

# The dtype of a storage by the name of the class that stands for the storage in a pickle.
_STORAGES: Mapping[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
}
_DTYPES: Mapping[str, torch.dtype] = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_TENSORS = ("torch.nn.parameter.Parameter", "torch.Tensor", "torch._tensor.Tensor")
# The classes, besides storages, that allocate as many elements as their argument says. A pickle that calls one of them
# with a number is refused, because the file could ask for any amount of memory.
_TAKE_SIZES = ("builtins.bytearray", *_TENSORS, *(name.replace("Storage", "Tensor") for name in _STORAGES))
# The prefix of torch's functions that make tensors. All known ones are listed in `_Maker`; the others make tensors
# without plain bytes, that is sparse, quantized, nested and meta tensors, and are refused.
_NOT_PLAIN = "torch._utils._rebuild_"

StandIns = Mapping[str, Callable[..., Any]]


def load(path: Path, stand_ins: StandIns | None = None) -> Any:
    """Return the content of a file of torch.save, with its tensors mapped from the file.

    Args:
        path: the file.
        stand_ins: the functions that are called in place of classes that the file names, by the class's full name. The
            class itself is never imported.

    Raises:
        ImportCheckpointError: the file is damaged, is not a file of torch.save, or needs a class that is not allowed,
            which the message names.
    """
    try:
        with open_regular(path) as file:
            archive = TorchArchive(file, path)
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return _content(archive, memory, path, stand_ins or {})
    except OSError as error:
        raise ImportCheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def load_embedded(content: bytearray, where: str, stand_ins: StandIns | None = None) -> Any:
    """Return the object that `torch.save` has written into a part of a file, after its checksums were compared.

    Args:
        content: the bytes of the part, which the tensors of the object share.
        where: the name of the part, for error texts.
        stand_ins: see `load`.

    Raises:
        ImportCheckpointError: the bytes are damaged, or name a class that is not allowed.
    """
    with io.BytesIO(content) as file:
        archive = TorchArchive(file, where)
        archive.verify()
        return _content(archive, content, where, stand_ins or {})


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict in a file of torch.save. It raises ImportCheckpointError like `load`."""
    content = load(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ImportCheckpointError(f"{path} has no state dict, but a {type(content).__name__}")
    foreign = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if foreign:
        raise ImportCheckpointError(
            f"{path} is no state dict, because its entry {foreign[0]!r} is a {type(content[foreign[0]]).__name__}"
        )
    for name, tensor in content.items():
        check_tensor(path, name, tensor)
    return content


def check_tensor(path: Path, name: str, tensor: Any) -> torch.Tensor:
    """Return `tensor` if it is a tensor whose elements lie one after another in bytes of the file.

    It can raise ImportCheckpointError.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ImportCheckpointError(f"{path}: {name!r} is a {type(tensor).__name__} where a tensor is expected")
    # A tensor that is not contiguous is refused, because with a stride of 0 a small file could stand for a tensor of
    # any size.
    if not tensor.is_contiguous() or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ImportCheckpointError(f"{path}: tensor {name!r} of shape {list(tensor.shape)} is not contiguous")
    return tensor


def verify(path: Path) -> None:
    """Read the whole file, and compare each record with its checksum. It can raise ImportCheckpointError."""
    try:
        with open_regular(path) as file:
            TorchArchive(file, path).verify()
    except OSError as error:
        raise ImportCheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def judged(content: bytes, where: str) -> bytes:
    """Return a copy of a file of torch.save that `torch.load(weights_only=True)` may read.

    The records are written anew, so torch's reader of archives sees the same pickle that was checked here. torch
    decides which functions the pickle may name; this function refuses only those that can take any amount of memory.

    Raises:
        ImportCheckpointError: the bytes are damaged, or would make objects that are much larger than the bytes.
    """
    with io.BytesIO(content) as file:
        archive = TorchArchive(file, where)
        archive.verify()
        value, _ = _pickle(archive, where)
        for made in plain_pickle.calls(value):
            takes_size = str(made.callee) in _TAKE_SIZES or str(made.callee) in _STORAGES
            if takes_size and any(isinstance(argument, int) for argument in made.args):
                raise ImportCheckpointError(f"{where} is not loaded: {made.callee} would have any size")
        written = io.BytesIO()
        with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as copy:
            for name, record in archive.records.items():
                copy.writestr(f"archive/{name}", archive.read(record))
    return written.getvalue()


def _pickle(archive: TorchArchive, where: object) -> tuple[Any, set[Name]]:
    """Return what the archive's pickle says, as `plain_pickle.read` returns it, and all names in the pickle.

    It can raise ImportCheckpointError.
    """
    record = archive.records.get(_PICKLE)
    if record is None or record.size_bytes > _MAX_PICKLE_BYTES:
        size = "no pickle" if record is None else f"a pickle of {record.size_bytes} bytes, above {_MAX_PICKLE_BYTES}"
        raise ImportCheckpointError(f"{where} is not a file of torch.save, or a damaged one: it has {size}")
    try:
        return plain_pickle.read(archive.read(record))
    except plain_pickle.PlainPickleError as error:
        raise damaged(where, error) from None


def _content(archive: TorchArchive, memory: mmap.mmap | bytearray, where: object, stand_ins: StandIns) -> Any:
    """Return the object that an archive holds. Its tensors are views of `memory`, the archive's own bytes.

    It can raise ImportCheckpointError.
    """
    value, names = _pickle(archive, where)
    if (order := archive.records.get(_BYTE_ORDER)) and archive.read(order).decode(errors="replace") != sys.byteorder:
        raise ImportCheckpointError(f"{where} was saved on a machine with another order of bytes")
    maker = _Maker(memory, archive.records, stand_ins)
    if foreign := sorted(str(name) for name in names if not maker.knows(name)):
        if all(name.startswith(_NOT_PLAIN) for name in foreign):
            raise ImportCheckpointError(f"{where} has a tensor that is not a plain dense tensor ({foreign[0]})")
        raise ImportCheckpointError(
            f"{where} is not loaded, because its pickle names {', '.join(foreign)}, which could run any code. Save the "
            "checkpoint again without these objects (in a client state, write numbers, strings, tensors, lists and "
            "dicts)"
        )
    try:
        return maker.make(value)
    except Exception as error:
        # A damaged pickle can raise an error of any class, and so can a stand-in for a class, so errors of all classes
        # are caught.
        raise damaged(where, error) from None


class _Maker:
    """The maker of the objects that a pickle describes. An error of any class means that the pickle is not valid."""

    def __init__(self, memory: mmap.mmap | bytearray, records: Mapping[str, Record], stand_ins: StandIns) -> None:
        self._memory = memory
        self._records = records
        self._stand_ins = stand_ins
        self._made: dict[int, Any] = {}
        self._storages: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._makers: Mapping[str, Callable[[Made], Any]] = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_untyped,
            # A Parameter becomes its tensor alone, without gradient, hooks and attributes, because importers need the
            # values only.
            "torch._utils._rebuild_parameter": lambda made: self.make(made.args[0]),
            "torch._utils._rebuild_parameter_with_state": lambda made: self.make(made.args[0]),
            "torch._tensor._rebuild_from_type_v2": lambda made: self._new(Made(made.args[0], made.args[2])),
            "torch.Size": lambda made: tuple(_sizes(made.args[0])),
            "torch.device": lambda made: torch.device(*map(self.make, made.args)),
            "torch.serialization._get_layout": lambda made: str(made.args[0]),
            "collections.OrderedDict": self._dict,
            "collections.Counter": lambda made: Counter(self._dict(made)),
            "builtins.set": lambda made: set(map(self.make, made.args[0] if made.args else made.items or ())),
            "builtins.complex": lambda made: complex(*map(float, made.args)),
            "builtins.bytearray": self._bytes,
            "_codecs.encode": lambda made: made.args[0].encode("latin-1"),
        }

    def knows(self, name: Name) -> bool:
        """Return whether `make` can make objects of the function or class that `name` names."""
        return (
            str(name) in self._makers
            or str(name) in self._stand_ins
            or str(name) in _DTYPES
            or str(name) in _STORAGES
            or str(name) in _TENSORS
        )

    def make(self, value: Any) -> Any:
        """Return the object that a value of the pickle describes.

        If several values refer to one value, they refer to one object in the result, too.
        """
        if not isinstance(value, tuple | list | dict | Made | Name):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        match value:
            case tuple():
                return tuple(map(self.make, value))
            case list():
                return list(map(self.make, value))
            case dict():
                return {self.make(key): self.make(item) for key, item in value.items()}
            case Name():
                return _DTYPES[str(value)] if str(value) in _DTYPES else self._stand_ins[str(value)]
            case _:
                name = str(value.callee)
                return self._makers[name](value) if name in self._makers else self._stand_in(value)

    def _dict(self, made: Made) -> dict[Any, Any]:
        given = [pair for part in made.args for pair in (part.items() if isinstance(part, dict) else part)]
        return {self.make(key): self.make(item) for key, item in (*given, *(made.pairs or ()))}

    def _stand_in(self, made: Made) -> Any:
        found = self._stand_ins[str(made.callee)](*map(self.make, made.args))
        if made.state is not None and hasattr(found, "__setstate__"):
            found.__setstate__(self.make(made.state))
        elif made.state is not None:
            found.__dict__.update(self.make(made.state))
        return found

    def _bytes(self, made: Made) -> bytearray:
        """Return the bytearray that a call in the pickle describes.

        A call that gives only a length is refused, because a file could ask for any length.
        """
        content = self.make(made.args[0]) if made.args else b""
        if not isinstance(content, bytes):
            raise TypeError(f"a bytearray of a {type(content).__name__}")
        return bytearray(content)

    def _tensor(self, made: Made) -> torch.Tensor:
        storage, offset, size, stride = made.args[:4]
        return _strided(self._storage(storage, None), offset, size, stride)

    def _tensor_of_untyped(self, made: Made) -> torch.Tensor:
        storage, offset, size, stride, _, _, dtype, *_ = made.args
        return _strided(self._storage(storage, self.make(dtype)), offset, size, stride)

    def _storage(self, storage: Outside, dtype: torch.dtype | None) -> torch.Tensor:
        """Return all elements of a storage of the file as a 1-D tensor, the same one each time it is used."""
        kind, name, key, _, numel = storage.key
        stored = _STORAGES[str(name)]
        if kind != "storage" or not isinstance(numel, int):
            raise TypeError("a storage that is none")
        record = self._records[f"{_DATA}{key}"]
        nbytes = numel * stored.itemsize
        if not 0 <= nbytes <= record.size_bytes:
            raise ValueError(f"a storage of {nbytes} bytes in a record of {record.size_bytes}")
        dtype = dtype or stored
        if (key, dtype) not in self._storages:
            count = nbytes // dtype.itemsize
            self._storages[key, dtype] = (
                torch.frombuffer(self._memory, dtype=dtype, count=count, offset=record.first_byte)
                if count
                else torch.empty(0, dtype=dtype)
            )
        return self._storages[key, dtype]


def _sizes(values: Any) -> tuple[int, ...]:
    """Return `values` as the sizes, strides or offsets of a tensor. Raise ValueError if no tensor can have them."""
    sizes = tuple(values.args[0] if isinstance(values, Made) else values)
    if len(sizes) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in sizes):
        raise ValueError("a tensor with impossible sizes")
    return sizes


def _strided(flat: torch.Tensor, offset: int, size: Any, stride: Any) -> torch.Tensor:
    """Return the view of a storage that a tensor is. Raise ValueError if it has elements outside the storage."""
    sizes, strides, (first,) = _sizes(size), _sizes(stride), _sizes((offset,))
    if len(sizes) != len(strides) or math.prod(sizes) > _MAX_SIZE:
        raise ValueError("a tensor with impossible sizes")
    if not math.prod(sizes):
        return flat.new_empty(sizes)
    if first + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) >= flat.numel():
        raise ValueError("a tensor that leaves its storage")
    return flat.as_strided(sizes, strides, first)
