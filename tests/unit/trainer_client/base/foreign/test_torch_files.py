"""Files of torch.save have the values that torch reads in them, and one reader alone decides what they have."""

from __future__ import annotations

import base64
import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_client.base.foreign import torch_files
from trainer_client.errors import ClientStateError, ImportCheckpointError
from trainer_client.training.run import client_state

TIED = torch.arange(6.0)
VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "x"], "b": (1, (2, 3)), 7: -(1 << 40)},
    "others": [{1, 2}, b"bytes", bytearray(b"array"), 1 + 2j, Counter("abca"), torch.Size((2, 3))],
    "types": [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
    "state dict": OrderedDict(weight=torch.arange(6.0).view(2, 3), bias=torch.nn.Parameter(torch.ones(2))),
    "views": [TIED, TIED.view(2, 3), TIED[2:4], TIED.view(2, 3).t()],
    "empty": [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(5.0)],
    "dtypes": [
        torch.arange(5).to(dtype)
        for dtype in (
            *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
            *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16),
        )
    ],
}


def flat(value: Any) -> list[Any]:
    """Return what a value consists of, in order, with each tensor as its dtype, its shape and its bytes."""
    if isinstance(value, torch.Tensor):
        return [
            value.dtype,
            tuple(value.shape),
            value.stride(),
            bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy()),
        ]
    if isinstance(value, dict):
        return [part for pair in value.items() for part in flat(list(pair))]
    if isinstance(value, list | tuple):
        return [part for item in value for part in flat(item)]
    return [value]


@pytest.mark.parametrize("name", VALUES)
def test_the_values_are_those_that_torch_reads(tmp_path: Path, name: str) -> None:
    torch.save(VALUES[name], tmp_path / "file.pt")
    expected = flat(torch.load(tmp_path / "file.pt", weights_only=True))
    assert flat(torch_files.load(tmp_path / "file.pt")) == expected
    assert flat(torch_files.load_embedded(bytearray((tmp_path / "file.pt").read_bytes()), "here")) == expected
    torch_files.verify(tmp_path / "file.pt")


def test_tensors_that_share_bytes_share_them_again_and_are_mapped(tmp_path: Path) -> None:
    torch.save(VALUES["views"], tmp_path / "file.pt")
    whole, _, part, _ = torch_files.load(tmp_path / "file.pt")
    whole[2] = 77.0
    assert part[0] == 77.0
    assert torch.load(tmp_path / "file.pt", weights_only=True)[0][2] == 2.0, "the file stays as it is"


def saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def archive(records: dict[str, bytes], **compression: int) -> bytes:
    """Return an archive of records, compressed as `compression` says for the last part of their names."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as written:
        for name, data in records.items():
            method = compression.get(name.rpartition("/")[2].partition(".")[0], zipfile.ZIP_STORED)
            written.writestr(name, data, compress_type=method)
    return content.getvalue()


def with_two_directories() -> bytes:
    """Return an archive of which zipfile reads the second list of records, and torch the first one.

    Both lists have the same size, and the same place in their parts of the file. The first one says that the pickle is
    compressed, and the pickle is a text of 16 MiB.
    """
    others = {"a/version": b"3\n", "a/byteorder": b"little"}
    bomb = archive({"a/data.pkl": pickle.dumps("x" * (16 << 20), 2)} | others, data=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(io.BytesIO(bomb)) as opened:
        size = opened.getinfo("a/data.pkl").compress_size
    more = len(pickle.dumps("x" * size, 2)) - size
    return bomb + archive({"a/data.pkl": pickle.dumps("x" * (size - more), 2)} | others)


def with_another_first_byte(content: bytes, offset: int) -> bytes:
    """Move the place at which the list of records says that the first record begins."""
    changed = bytearray(content)
    at = content.rindex(b"PK\1\2", 0, content.index(b"data.pkl", content.index(b"PK\1\2")) + 1)
    struct.pack_into("<I", changed, at + 42, offset)
    return bytes(changed)


def on_two_disks(content: bytes) -> bytes:
    """Insert the record of large archives which says that the archive spans two disks."""
    end = len(content) - 22
    return content[:end] + struct.pack("<4sLQL", b"PK\6\7", 0, 0, 2) + content[end:]


ONE = {"a/data.pkl": b"\x80\x02N.", "a/version": b"3\n"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (with_two_directories(), "overlaps another one, or is not the first of the file"),
        (b"other bytes" + archive(ONE), "is not the first of the file"),
        (archive(ONE, data=zipfile.ZIP_DEFLATED), "is compressed"),
        (archive(ONE, version=zipfile.ZIP_BZIP2), "is compressed"),
        (with_another_first_byte(archive(ONE), 1), "has no header|is not the first"),
        (archive({"a/data.pkl": b"\x80\x02N.", "b/version": b"3\n"}), "only directory"),
        (archive({"data.pkl": b"\x80\x02N."}), "has no name of its own"),
        (archive({"a/version": b"3\n"}), "it has no pickle"),
        (archive(ONE | {"a/byteorder": b"big"}), "another order of bytes"),
        (archive(ONE)[:-30], "cut short|damaged"),
        (on_two_disks(archive(ONE)), "damaged.*span multiple disks"),
        (b"", "cut short"),
    ],
)
def test_an_archive_that_torch_does_not_write_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    for read in (torch_files.load, lambda path: torch_files.load_embedded(bytearray(path.read_bytes()), "here")):
        with pytest.raises(ImportCheckpointError, match=reason):
            read(tmp_path / "file.pt")


def test_the_archive_with_two_lists_is_one_that_torch_would_inflate(tmp_path: Path) -> None:
    content = with_two_directories()
    (tmp_path / "file.pt").write_bytes(content)
    assert len(torch.load(tmp_path / "file.pt", weights_only=True)) == 16 << 20 > 500 * len(content)
    with zipfile.ZipFile(tmp_path / "file.pt") as opened:
        assert {entry.compress_type for entry in opened.infolist()} == {zipfile.ZIP_STORED}


def test_two_records_of_one_place_are_refused(tmp_path: Path) -> None:
    content = archive({"a/data.pkl": b"\x80\x02N.", "a/data/0": b"xxxx", "a/data/1": b"xxxx"})
    places = [at for at in range(len(content)) if content.startswith(b"PK\1\2", at)]
    changed = bytearray(content)
    changed[places[2] + 42 : places[2] + 46] = content[places[1] + 42 : places[1] + 46]
    (tmp_path / "file.pt").write_bytes(changed)
    with pytest.raises(ImportCheckpointError, match="overlaps another one"):
        torch_files.load(tmp_path / "file.pt")


# A call by which some bytes of a pickle ask for a terabyte.
ENDLESS = b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85R."
ENDLESS_TENSOR = b"\x80\x02ctorch\nFloatTensor\n\x8a\x06\0\0\0\0\0\1\x85R."


@pytest.mark.parametrize("pickled", [ENDLESS, ENDLESS_TENSOR])
def test_a_few_bytes_do_not_become_many(tmp_path: Path, pickled: bytes) -> None:
    content = archive({"a/data.pkl": pickled, "a/byteorder": b"little"})
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(ImportCheckpointError):
        torch_files.load(tmp_path / "file.pt")
    with pytest.raises(ImportCheckpointError, match="would have any size"):
        torch_files.judged(content, "here")


def test_a_user_state_that_is_compressed_or_large_is_refused() -> None:
    for content in (with_two_directories(), archive({"a/data.pkl": ENDLESS, "a/byteorder": b"little"})):
        with pytest.raises(ClientStateError, match="the stored state cannot be read"):
            client_state.decode_freely({"torch": base64.b64encode(content).decode()})


def test_a_storage_and_a_tensor_stay_within_their_bytes(tmp_path: Path) -> None:
    content = saved(torch.arange(4.0))
    for wrong in (
        content.replace(b"K\x04tq", b"K\x05tq"),  # numel of the storage
        content.replace(b"K\x04\x85q", b"K\x05\x85q"),  # size of the tensor
        content.replace(b"K\x01\x85q", b"K\x02\x85q"),  # stride
    ):
        assert wrong != content
        (tmp_path / "file.pt").write_bytes(wrong)
        with pytest.raises(ImportCheckpointError, match=r"is damaged or not a file of torch\.save: a "):
            torch_files.load(tmp_path / "file.pt")
