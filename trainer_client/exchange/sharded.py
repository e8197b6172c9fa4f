"""The division of a model into files of limited size, with the names and the index that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from trainer_client.exchange.destination import Destination
from trainer_client.exchange.stored_model import ModelTensor


def write_sharded(
    tensors: Sequence[ModelTensor],
    destination: Destination,
    max_shard_bytes: int,
    stem: str,
    suffix: str,
    write_file: Callable[[str, Sequence[ModelTensor]], None],
    *,
    with_aliases: bool,
) -> None:
    """Write tensors to one file, or to several files and an index that names the file of each tensor.

    Args:
        tensors: the tensors.
        destination: the directory of the files.
        max_shard_bytes: the most bytes of tensors in one file; a tensor with more bytes has a file of its own.
        stem: the part of a file's name before its number, for example "model".
        suffix: the part of a file's name after its number, for example ".safetensors".
        write_file: writes some of the tensors to a file with a given name.
        with_aliases: whether `write_file` writes the further names of tied tensors, so that the index must list them,
            too.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(f"{stem}{suffix}", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        write_file(name, shard)
        for tensor in shard:
            weight_map |= dict.fromkeys((tensor.name, *(tensor.aliases if with_aliases else ())), name)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    with destination.create(f"{stem}{suffix}.index.json") as file:
        file.write(f"{json.dumps(index, indent=2, sort_keys=True)}\n".encode())


def _split(tensors: Sequence[ModelTensor], most_bytes: int) -> list[list[ModelTensor]]:
    """Return the tensors in their order, in lists of at most `most_bytes`; a larger tensor has a list of its own."""
    shards: list[list[ModelTensor]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if shards[-1] and nbytes + tensor.nbytes > most_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(tensor)
        nbytes += tensor.nbytes
    return shards
