"""The export as safetensors files, as transformers writes them, piece by piece.

The library `safetensors` writes only tensors that are whole in memory, so this module writes the format itself: eight
bytes with the length of the header, the header as JSON, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format). This module must never hold more than one piece of a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from trainer_client.client.store_client.types import bytes_of
from trainer_client.errors import ExportError
from trainer_client.exchange.destination import Destination
from trainer_client.exchange.sharded import write_sharded
from trainer_client.exchange.stored_model import ModelTensor, StoredModel

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA = "__metadata__"
# The tensors begin at a multiple of this number of bytes, as in files that the library `safetensors` writes.
_ALIGNMENT_BYTES = 8


def write_safetensors(
    model: StoredModel,
    tensors: Sequence[ModelTensor],
    destination: Destination,
    max_shard_bytes: int,
    *,
    stem: str = "model",
    names: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as `STEM.safetensors`, or as numbered files with an index.

    A tied tensor is written once, under the name that the store has, because transformers ties the parameters again by
    the model's config. `names` maps a tensor's name in the store to its name in the file, where the two differ.

    Raises:
        ExportError: the format cannot have a tensor, which the message names.
    """
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.name == _METADATA:
            raise ExportError(f"safetensors cannot have tensor {tensor.name!r} of {tensor.dtype}")

    def write_file(name: str, shard: Sequence[ModelTensor]) -> None:
        # Tensors of wide types are written first, so that each tensor begins at a multiple of its element's size.
        ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
        with destination.create(name) as file:
            file.write(_header(ordered, names or {}))
            for tensor in ordered:
                for piece in model.pieces(tensor):
                    file.write(bytes_of(piece).numpy().data)

    write_sharded(tensors, destination, max_shard_bytes, stem, ".safetensors", write_file, with_aliases=False)


def _header(tensors: Sequence[ModelTensor], names: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file that has these tensors: the header's length, and the header."""
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    for tensor in tensors:
        first, end = end, end + tensor.nbytes
        entries[names.get(tensor.name, tensor.name)] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
