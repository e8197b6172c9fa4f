"""The loading of weights from safetensors files: ranges of elements, weights that do not fit, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainer_client import ConfigError
from trainer_client.training.initial.loading import Weights
from trainer_client.training.model.slot_table import make_slot_table


def read_bytes() -> int:
    """Return the number of bytes that this process has read by read() and similar system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_range_has_the_bits_of_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(7, 13).to(dtype), "b": torch.randn(1, 5).to(dtype), "empty": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "some.safetensors", metadata={"format": "pt"})
    weights = Weights(tmp_path / "some.safetensors")
    for name, tensor in tensors.items():
        for offset, count in ((0, tensor.numel()), (tensor.numel() // 2, tensor.numel() // 3), (tensor.numel(), 0)):
            target = torch.full((count,), torch.nan)
            weights.tensors[name].read_into(target, offset, torch.float32)
            assert torch.equal(target, tensor.flatten()[offset : offset + count].float())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_read_each_byte_once(tmp_path: Path, world_size: int) -> None:
    # The first tensor is larger than the block that `read_into` reads at once.
    tensors = {"a": torch.randn(5_000_000), "b": torch.randn(17, 1001), "c": torch.randn(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    table = make_slot_table([(name, tensor.numel()) for name, tensor in tensors.items()], world_size)
    partition = torch.empty(table.partition_numel)
    before = read_bytes()
    overhead = read_bytes() - before  # Reading /proc/self/io counts too.
    for rank in range(world_size):
        for shard in table.shards_of(rank):
            part = partition[shard.in_partition]
            weights.tensors[shard.fqn].read_into(part, shard.offset, torch.float32)
            assert torch.equal(part, tensors[shard.fqn].flatten()[shard.offset : shard.offset + shard.numel])
    read = read_bytes() - before - 2 * overhead
    expected = sum(tensor.nbytes for tensor in tensors.values())
    assert abs(read - expected) < 100, "the figures in /proc/self/io have different numbers of digits"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def test_what_fits_is_found_and_all_that_does_not_is_listed(tmp_path: Path) -> None:
    model = Tied()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del state["embedding.weight"]  # A tied weight needs to be there under one of its names only.
    wanted = list(model.state_dict(keep_vars=True).items())
    keys = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    save_file(state, tmp_path / "a.safetensors")
    found = Weights(tmp_path / "a.safetensors").match(wanted, keys, strict=True)
    assert found.parameters.keys() == set(range(4))
    assert found.parameters[0].name == "head.weight"
    assert found.buffers.keys() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}

    state |= {"norm.bias": torch.zeros(5), "extra": torch.zeros(1)}
    del state["head.weight"], state["norm.running_var"]
    save_file(state, tmp_path / "b.safetensors")
    weights = Weights(tmp_path / "b.safetensors")
    with pytest.raises(ConfigError) as refused:
        weights.match(wanted, keys, strict=True)
    assert str(refused.value).splitlines()[1:-1] == [
        "embedding.weight is missing in the files",
        "extra is unexpected: the model has no such tensor",
        "head.weight is missing in the files",
        "norm.bias is [5] in b.safetensors, [3] here",
        "norm.running_var is missing in the files",
    ]
    with pytest.raises(ConfigError, match=r"norm\.bias is \[5\]"):
        weights.match(wanted, keys, strict=False)
    del state["norm.bias"]
    save_file(state, tmp_path / "c.safetensors")
    assert Weights(tmp_path / "c.safetensors").match(wanted, keys, strict=False).parameters.keys() == {1, 2}


def test_files_that_are_not_what_they_should_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write the path"):
        Weights(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        Weights(tmp_path)
    path.write_bytes((9).to_bytes(8, "little") + b"{not json")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        Weights(path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(15))
    with pytest.raises(ConfigError, match="'w' has offsets 0:16 that do not fit"):
        Weights(path)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    whole = Weights(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="ends within tensor 'w'"):
        whole.tensors["w"].read_into(torch.empty(4), 0, torch.float32)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"v": "model.safetensors"}}))
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ConfigError, match="no tensor 'v'"):
        Weights(tmp_path)
    index.write_text("[]")
    with pytest.raises(ConfigError, match="not an index"):
        Weights(tmp_path)


def test_the_index_says_which_file_has_a_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "first.safetensors")
    save_file({"b": torch.zeros(3), "a": torch.zeros(2), "c": torch.zeros(1)}, tmp_path / "second.safetensors")
    for files in ({"a": "first", "b": "second"}, {"b": "second", "a": "first"}, {"a": "second", "b": "first"}):
        weight_map = {name: f"{file}.safetensors" for name, file in files.items()}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        tensors = Weights(tmp_path).tensors
        assert {name: tensors[name].path.stem for name in files} == files
        assert "c" in tensors, "a tensor that the index does not list is found, too"


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        # The number of elements is a multiple of 2 ** 64.
        ([1 << 62, 4], [0, 0]),
        ([10**30], [0, 16]),
        ([4], [0.0, 16.0]),
        ([4], ["0", "16"]),
    ],
)
def test_a_size_or_a_place_that_is_no_number_of_bytes_is_refused(
    tmp_path: Path, shape: list[int], offsets: list[object]
) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ConfigError, match=r"do not fit it or the file|is not understood"):
        Weights(path)


def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        Weights(tmp_path / ("x" * 300))
