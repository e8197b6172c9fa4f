"""Checkpoints that are damaged, foreign or made to do harm are refused with an error that says why."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from tests.integration.support.deepspeed_checkpoint import write_checkpoint
from tests.special_files import SPECIAL_FILES, replace_with
from trainer_client.base.foreign import torch_files
from trainer_client.errors import CheckpointError, ImportCheckpointError
from trainer_client.exchange.checkpoint import Checkpoint
from trainer_client.exchange.dcp_source import open_dcp
from trainer_client.exchange.deepspeed_zero import open_deepspeed
from trainer_client.exchange.destination import CHECKSUMS
from trainer_client.exchange.source import DCP_METADATA, verify_checksums
from trainer_client.exchange.weight_files import open_safetensors, open_state_dict
from trainer_client.training.initial.loading import MOST_VALUES
from trainer_client.training.run import checkpoint_files


class Gone:
    """The stand-in for an object that is left out of a changed file."""

    def __reduce__(self) -> Any:
        return int, ()


class Harm:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def write_archive(path: Path, pickled: bytes, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("model/data.pkl", pickled)
        archive.writestr("model/version", "3\n")
        archive.writestr("model/byteorder", "little")
        for name, content in records.items():
            archive.writestr(f"model/data/{name}", content)
    return path


def flip(path: Path, pattern: bytes) -> None:
    """Flip a bit of the first occurrence of `pattern` in a file."""
    content = bytearray(path.read_bytes())
    content[content.index(pattern)] ^= 1
    path.write_bytes(content)


def test_a_pickle_that_names_a_function_is_refused_and_not_executed(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4), "harm": Harm(tmp_path / "done")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ImportCheckpointError, match=r"names posix\.mkdir, which could run any code"):
        open_state_dict(tmp_path, verify=True)
    assert not (tmp_path / "done").exists()


def test_archives_that_grow_are_refused(tmp_path: Path) -> None:
    bomb = write_archive(tmp_path / "bomb.bin", b"\0" * (64 << 20), {}, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(ImportCheckpointError, match=r"data\.pkl' is compressed"):
        torch_files.load(bomb)
    # A stride of 0 makes a tensor of any size of one element.
    torch.save({"weight": torch.ones(1).expand(1 << 40)}, tmp_path / "expanded.bin")
    with pytest.raises(ImportCheckpointError, match="is not contiguous"):
        torch_files.load_tensors(tmp_path / "expanded.bin")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(pickle.dumps({"weight": [1.0]}))
    with pytest.raises(ImportCheckpointError, match=r"not a file of torch\.save in its present format"):
        torch_files.load(path)
    with pytest.raises(ImportCheckpointError, match=r"is damaged or not a file of torch\.save"):
        torch_files.load(write_archive(tmp_path / "foreign.bin", b"\x80\x02}q\x00X", {}))
    for content, reason in (
        ([1, 2], "but a list"),
        ({"weight": 3}, "'weight' is a int"),
        ({1: torch.ones(1)}, "no state"),
    ):
        torch.save(content, path)
        with pytest.raises(ImportCheckpointError, match=reason):
            torch_files.load_tensors(path)
    torch.save({"weight": torch.ones(4, 4).to_sparse()}, path)
    with pytest.raises(ImportCheckpointError, match="not a plain dense tensor"):
        torch_files.load_tensors(path)


def test_files_that_are_cut_or_changed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    torch.save({"weight": torch.arange(1000.0)}, path)
    torch_files.verify(path)
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 10, 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ImportCheckpointError):
            torch_files.load(path)
    path.write_bytes(whole)
    flip(path, struct.pack("<f", 500.0))
    with pytest.raises(ImportCheckpointError, match="record 'data/0' differs from its checksum"):
        verify_checksums([path])
    save_file({"weight": torch.arange(9.0)}, tmp_path / "model.safetensors")
    (tmp_path / CHECKSUMS).write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(ImportCheckpointError, match=f"and {CHECKSUMS} has 0000"):
        open_safetensors(tmp_path, verify=True)
    open_safetensors(tmp_path, verify=False)


def safetensors_file(path: Path, header: object, data: int = 64, size: int | None = None) -> None:
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + bytes(data))


def entry(first: int, last: int, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(last - first) // 4] if shape is None else shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        ({"a": entry(0, 16), "b": entry(8, 24)}, None, "overlaps another one"),
        ({"a": entry(0, 16), "b": entry(20, 24)}, None, "has a gap before it"),
        ({"a": entry(0, 128)}, None, "do not fit it or the file"),
        ({"a": entry(0, 16, [1 << 60, 1 << 60])}, None, "do not fit|not understood"),
        ({"a": entry(0, 16, [-2, -2])}, None, "not understood"),
        ({"a": {"dtype": "F32"}}, None, "not understood"),
        ([1], None, "its header is a list"),
        ({}, 1 << 40, "its header would have"),
        ({}, 500, "not a safetensors file"),
        ({"a": entry(0, 16)}, None, "48 bytes follow the last tensor"),
        ({"a": [[]] * 3}, None, "not understood"),
    ],
)
def test_a_hostile_safetensors_header_is_refused(tmp_path: Path, header: object, size: int | None, reason: str) -> None:
    safetensors_file(tmp_path / "model.safetensors", header, size=size)
    with pytest.raises(ImportCheckpointError, match=reason):
        open_safetensors(tmp_path, verify=False)


def test_a_header_of_a_million_names_is_refused_before_it_is_taken_apart(tmp_path: Path) -> None:
    header = b'{"x":[0,0]' + b',"x":[0,0]' * (MOST_VALUES // 3) + b"}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ImportCheckpointError, match=f"values, above {MOST_VALUES}"):
        open_safetensors(tmp_path, verify=False)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ImportCheckpointError, match="nested too deeply"):
        open_safetensors(tmp_path, verify=False)


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "..", "a/b.bin", 3])
def test_an_index_names_only_files_of_its_directory(tmp_path: Path, name: object) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    torch.save({"weight": torch.ones(1)}, tmp_path / "outside.bin")
    save_file({"weight": torch.ones(1)}, tmp_path / "outside.safetensors")
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ImportCheckpointError, match="not in its own directory"):
        open_state_dict(directory, verify=False)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ImportCheckpointError, match="not in its own directory"):
        open_safetensors(directory, verify=False)


def write_dcp(path: Path) -> Path:
    save({"model": {"weight": torch.arange(24.0).view(4, 6)}}, checkpoint_id=path, no_dist=True)
    return path


def change_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    metadata: Metadata = pickle.loads((path / DCP_METADATA).read_bytes())
    change(metadata)
    (path / DCP_METADATA).write_bytes(pickle.dumps(metadata))


def read_all(checkpoint: Checkpoint) -> None:
    for tensor in checkpoint.tensors:
        tensor.weight.read(torch.empty(tensor.numel), 0)


# torch says so, although `no_dist` asks for it.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_hostile_dcp_checkpoint_is_refused(tmp_path: Path) -> None:
    whole = write_dcp(tmp_path / "whole")
    read_all(open_dcp(whole, verify=True))

    def changed(name: str, change: Callable[[Metadata], object]) -> Path:
        path = shutil.copytree(whole, tmp_path / name)
        change_metadata(path, change)
        return path

    def to_outside(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../whole/__0_0.distcp"

    def larger(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.weight"].size = torch.Size((1 << 30, 6))

    def large_chunk(metadata: Metadata) -> None:
        weight: Any = metadata.state_dict_metadata["model.weight"]
        weight.size = torch.Size((1 << 50, 6))
        weight.chunks[0].sizes = weight.size

    def past_the_end(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.length = 1 << 40

    (tmp_path / "harm").mkdir()
    (tmp_path / "harm" / DCP_METADATA).write_bytes(pickle.dumps(Harm(tmp_path / "done")))
    with pytest.raises(ImportCheckpointError, match=r"it has posix\.mkdir where .*\.Metadata is expected"):
        open_dcp(tmp_path / "harm", verify=False)
    assert not (tmp_path / "done").exists()
    with pytest.raises(ImportCheckpointError, match="not in its own directory"):
        open_dcp(changed("outside", to_outside), verify=False)
    with pytest.raises(ImportCheckpointError, match="have 24 elements, and the tensor"):
        open_dcp(changed("larger", larger), verify=False)
    # An import would cut the tensor into pieces before it reads one.
    with pytest.raises(ImportCheckpointError, match="has fewer bytes than elements"):
        open_dcp(changed("large chunk", large_chunk), verify=False)
    with pytest.raises(ImportCheckpointError, match="does not say where"):
        read_all(open_dcp(changed("nowhere", lambda metadata: metadata.storage_data.clear()), verify=False))
    with pytest.raises(ImportCheckpointError, match="leave the file"):
        read_all(open_dcp(changed("past", past_the_end), verify=False))
    flip(whole / "__0_0.distcp", struct.pack("<f", 17.0))
    with pytest.raises(ImportCheckpointError, match="differs from its checksum"):
        read_all(open_dcp(whole, verify=False))
    with (whole / "__0_0.distcp").open("r+b") as file:
        file.truncate(50)
    with pytest.raises(ImportCheckpointError, match="leave the file"):
        read_all(open_dcp(whole, verify=False))
    (whole / DCP_METADATA).write_bytes(b"\x80\x04junk")
    with pytest.raises(ImportCheckpointError, match="is not loaded"):
        open_dcp(whole, verify=False)


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    """A checkpoint of two ranks at stage 2; returns the directory of its tag."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    return write_checkpoint(tmp_path / "ck", model, optimizer, layout="stage 2", ranks=2, step=1, samples=2)


def change_file(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Load a file without the objects of DeepSpeed's classes, change its content, and write it again."""
    stand_ins: dict[str, Any] = {"runtime.zero.config.ZeroStageEnum": int}
    stand_ins |= {"runtime.fp16.loss_scaler.DynamicLossScaler": Gone, "utils.tensor_fragment.fragment_address": Gone}
    content = torch_files.load(path, {f"deepspeed.{name}": stand_in for name, stand_in in stand_ins.items()})
    # The tensors are mapped from the file, which is about to be written.
    content = copy.deepcopy(content)
    change(content)
    torch.save(content, path)


def test_a_broken_zero_checkpoint_is_refused(zero: Path) -> None:
    assert open_deepspeed(zero.parent, None, verify=True).step == 1

    def refused(reason: str, change: Callable[[Path], object]) -> None:
        changed = shutil.copytree(zero, zero.parent / "changed")
        change(changed)
        with pytest.raises(ImportCheckpointError, match=reason):
            open_deepspeed(changed, None, verify=False)
        shutil.rmtree(changed)

    model = "mp_rank_00_model_states.pt"
    first, second = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))

    def of_optimizer(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
        return lambda path: change_file(path / name, lambda content: change(content["optimizer_state_dict"]))

    def of_model(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
        return lambda path: change_file(path / model, change)

    def drop_optimizers(path: Path) -> None:
        (path / first).unlink()
        (path / second).unlink()

    refused("lacks the optimizer file of rank 0", lambda path: (path / first).unlink())
    refused("optimizer files of 1 ranks, and its partition_count", lambda path: (path / second).unlink())
    refused(r"has no file \*_optim_states", drop_optimizers)
    refused("no file .*_model_states.pt: it is no ZeRO", lambda path: (path / model).unlink())
    refused("tensor parallelism", lambda path: shutil.copy(path / model, path / "mp_rank_01_model_states.pt"))
    refused("files of experts", lambda path: (path / "layer_3_expert_1_mp_rank_00_model_states.pt").touch())
    refused("entry 'param_shapes' is a list|is a NoneType, not a list", of_model(lambda c: c.update(param_shapes=None)))
    refused(
        "have .* elements, and param_shapes has",
        of_model(lambda c: c["param_shapes"][0].update(weight=torch.Size((1 << 20, 5)))),
    )
    refused("no shape that is understood", of_model(lambda c: c["param_shapes"][0].update(weight="large")))
    refused("flattened groups, and param_shapes has 2", of_model(lambda c: c["param_shapes"].append({})))
    refused("global_steps is -1", of_model(lambda c: c.update(global_steps=-1)))
    refused("shared_params names 'nothing'", of_model(lambda c: c.update(shared_params={"tied": "nothing"})))
    refused(
        r"elements, .* on NVMe in other files",
        of_optimizer(second, lambda c: c.update(single_partition_of_fp32_groups=[torch.empty(0)])),
    )
    refused(
        "has no optimizer states of group 0", of_optimizer(second, lambda c: c["base_optimizer_state"]["state"].clear())
    )
    refused(
        "a state 'worker_error', which no optimizer here has",
        of_optimizer(first, lambda c: c["base_optimizer_state"]["state"][0].update(worker_error=torch.ones(10))),
    )
    refused("zero_stage 7", of_optimizer(first, lambda c: c.update(zero_stage=7)))
    refused("posix.mkdir", of_model(lambda c: c.update(mine=Harm(zero / "done"))))
    assert not (zero / "done").exists()

    (zero.parent / "latest").write_text("../../elsewhere")
    with pytest.raises(ImportCheckpointError, match="not in its own directory"):
        open_deepspeed(zero.parent, None, verify=False)
    with pytest.raises(ImportCheckpointError, match="not in its own directory"):
        open_deepspeed(zero.parent, "../ck", verify=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint of each format, each in a directory of its own."""
    root = tmp_path_factory.mktemp("checkpoints")
    tensors = {"weight": torch.arange(24.0).view(4, 6)}
    for name in ("safetensors", "torch"):
        (root / name).mkdir()
    save_file(tensors, root / "safetensors" / "part.safetensors")
    (root / "safetensors" / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "part.safetensors"}}')
    torch.save(tensors, root / "torch" / "part.bin")
    (root / "torch" / "pytorch_model.bin.index.json").write_text('{"weight_map": {"weight": "part.bin"}}')
    with warnings.catch_warnings(action="ignore"):
        write_dcp(root / "dcp")
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    write_checkpoint(root / "deepspeed", model, optimizer, layout="stage 2", ranks=2, step=1, samples=2)
    return root


OPEN: dict[str, Callable[[Path], Checkpoint]] = {
    "safetensors": lambda path: open_safetensors(path, verify=True),
    "torch": lambda path: open_state_dict(path, verify=True),
    "dcp": lambda path: open_dcp(path, verify=True),
    "deepspeed": lambda path: open_deepspeed(path, None, verify=True),
}


@pytest.mark.parametrize("what", SPECIAL_FILES)
@pytest.mark.parametrize("format", OPEN)
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, checkpoints: Path, format: str, what: str
) -> None:
    files = [path.relative_to(checkpoints) for path in sorted((checkpoints / format).rglob("*")) if path.is_file()]
    for number, file in enumerate(files):
        copied = tmp_path / str(number)
        shutil.copytree(checkpoints / format, copied / format)
        read_all(OPEN[format](copied / format))
        replace_with(copied / file, what)
        with pytest.raises((ImportCheckpointError, OSError)):
            read_all(OPEN[format](copied / format))
    # A list of checksums is read if there is one.
    (copied := tmp_path / "sums").mkdir()
    shutil.copytree(checkpoints / format, copied / format)
    SPECIAL_FILES[what](copied / format / CHECKSUMS)
    read_all(OPEN[format](copied / format))


def test_a_link_to_a_file_elsewhere_is_followed(tmp_path: Path, checkpoints: Path) -> None:
    """Caches of models consist of such links."""
    (tmp_path / "part.safetensors").symlink_to(checkpoints / "safetensors/part.safetensors")
    read_all(open_safetensors(tmp_path / "part.safetensors", verify=True))


@pytest.mark.parametrize("what", SPECIAL_FILES)
def test_what_is_no_manifest_of_a_checkpoint_is_refused_and_not_waited_for(tmp_path: Path, what: str) -> None:
    for name in (checkpoint_files.MANIFEST, checkpoint_files.LATEST):
        (tmp_path / name).mkdir()
        SPECIAL_FILES[what](tmp_path / name / name)
        with contextlib.suppress(CheckpointError, OSError):
            assert checkpoint_files.read_latest(tmp_path / name) is None
            checkpoint_files.read_manifest(tmp_path / name)
