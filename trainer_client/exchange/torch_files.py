"""Files of `torch.save`, opened without trust: nothing in them is executed, and tensors are mapped and not read.

A file of torch.save is a zip archive without compression: a pickle, and a record for the bytes of each storage. Loading
a pickle calls the functions that it names. So it is read by torch's restricted reader (`weights_only=True`). That
reader calls only functions that build tensors, and those that this module names as harmless. This module must never
call `torch.load` in another way.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.sparse import check_sparse_tensor_invariants

from trainer_client.errors import ImportCheckpointError

# The most bytes of the pickle in a file. It has names and shapes only: about 300 bytes for each tensor.
_MAX_PICKLE_BYTES = 512 << 20
_READ_AT_ONCE = 4 << 20


def load(path: Path, stand_ins: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Return the content of a file of torch.save, with its tensors mapped from the file.

    Args:
        path: the file.
        stand_ins: the functions that are called in place of classes that the file names, by the class's full name. The
            class itself is never imported.

    Raises:
        ImportCheckpointError: the file is damaged, is not a file of torch.save, or needs a class that is not allowed,
            which the message names.
    """
    _check_archive(path)
    allowed: list[Any] = [(stand_in, name) for name, stand_in in (stand_ins or {}).items()]
    try:
        # A sparse tensor whose indices lie outside of it would let later operations read other memory.
        with safe_globals(allowed), check_sparse_tensor_invariants():
            if foreign := sorted(get_unsafe_globals_in_checkpoint(str(path))):
                raise ImportCheckpointError(
                    f"{path} is not loaded, because its pickle names {', '.join(foreign)}, which could run any code. "
                    "Save the checkpoint again without these objects (in a client state, write numbers, strings, "
                    "tensors, lists and dicts)"
                )
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except ImportCheckpointError:
        raise
    except Exception as error:
        # A damaged pickle can raise an error of any class.
        raise _damaged(path, error) from None


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
    """Return `tensor` if it is dense, contiguous and backed by bytes of the file.

    It can raise ImportCheckpointError.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ImportCheckpointError(f"{path}: {name!r} is a {type(tensor).__name__} where a tensor is expected")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ImportCheckpointError(f"{path}: tensor {name!r} is not a plain dense tensor")
    # A stride of 0 would let a small file stand for a tensor of any size.
    if not tensor.is_contiguous() or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ImportCheckpointError(f"{path}: tensor {name!r} of shape {list(tensor.shape)} is not contiguous")
    return tensor


def verify(path: Path) -> None:
    """Read the whole file, and compare each record with its checksum. It can raise ImportCheckpointError."""
    _check_archive(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as record:
                    while record.read(_READ_AT_ONCE):
                        pass
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise _damaged(path, error) from None


def load_embedded(content: bytes, where: str) -> Any:
    """Return the object that `torch.save` has written into a part of a file, after its checksums were compared.

    Args:
        content: the bytes of the part.
        where: the name of the part, for error texts.

    Raises:
        ImportCheckpointError: the bytes are damaged, or name a class that is not allowed.
    """
    file = io.BytesIO(content)
    _check_entries(file, len(content), where)
    try:
        with zipfile.ZipFile(file) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ImportCheckpointError(f"{where}: record {damaged!r} differs from its checksum")
        file.seek(0)
        with check_sparse_tensor_invariants():
            return torch.load(file, map_location="cpu", weights_only=True)
    except ImportCheckpointError:
        raise
    except Exception as error:
        # A damaged pickle can raise an error of any class.
        raise _damaged(where, error) from None


def _check_archive(path: Path) -> None:
    """Refuse a file that is not an archive of torch.save, or whose records are compressed.

    It raises ImportCheckpointError.
    """
    with path.open("rb") as file:
        _check_entries(file, path.stat().st_size, path)


def _check_entries(file: IO[bytes], size: int, where: object) -> None:
    """Refuse an archive that could take more memory than the file has bytes. It raises ImportCheckpointError."""
    if not zipfile.is_zipfile(file):
        raise ImportCheckpointError(
            f"{where} is not a file of torch.save in its present format, a zip archive, or it is cut short"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _damaged(where, error) from None
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ImportCheckpointError(
                f"{where}: record {entry.filename!r} is compressed, which torch.save never does"
            )
        if entry.filename.endswith("/data.pkl") and entry.file_size > _MAX_PICKLE_BYTES:
            raise ImportCheckpointError(f"{where}: its pickle has {entry.file_size} bytes, above {_MAX_PICKLE_BYTES}")
    if sum(entry.file_size for entry in entries) > size:
        raise ImportCheckpointError(f"{where}: its records overlap, because together they are larger than the file")


def _damaged(where: object, error: Exception) -> ImportCheckpointError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return ImportCheckpointError(f"{where} is damaged or not a file of torch.save: {reason}")
