"""A flat buffer maps bytes of a file at its own address: nothing is copied, and nothing is written back."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer_client.client.transport import mapping
from trainer_client.client.transport.mapping import FileRange, map_file_at
from trainer_client.training.model.flat_memory import FlatMemory

PAGE = mmap.PAGESIZE
NUMEL = 3 * PAGE // 4 + 5  # As fp32, these are three pages and 20 bytes.


@pytest.fixture
def shared() -> Iterator[FileRange]:
    """Eight pages of ones in a file, and the place of the second page, from which on a test maps them."""
    descriptor = os.memfd_create("shared")
    os.write(descriptor, torch.ones(8 * PAGE // 4).numpy().tobytes())
    yield FileRange(descriptor=descriptor, offset=PAGE)
    os.close(descriptor)


def memory() -> FlatMemory:
    made = FlatMemory(NUMEL, torch.float32, torch.device("cpu"), marks=[0, PAGE // 4])
    made.free()
    made.allocate()
    return made


def test_memory_that_is_there_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's storages on GPUs do not look whether they have the size already."""
    flat = FlatMemory(NUMEL, torch.float32, torch.device("meta"))
    taken: list[int] = []
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, nbytes: taken.append(nbytes))

    flat.allocate()
    flat.free()
    flat.allocate()
    flat.allocate()

    assert taken == [0, NUMEL * 4]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_is_allocated_from_its_construction_until_it_is_freed(device: str) -> None:
    """On the meta device, the memory is that of a storage which is resized, as on a GPU."""
    flat = FlatMemory(NUMEL, torch.float32, torch.device(device))
    seen = [(flat.is_allocated, flat.tensor.untyped_storage().nbytes())]
    flat.free()
    seen.append((flat.is_allocated, flat.tensor.untyped_storage().nbytes()))
    flat.allocate()
    seen.append((flat.is_allocated, flat.tensor.untyped_storage().nbytes()))

    freed_bytes = NUMEL * 4 if device == "cpu" else 0
    assert seen == [(True, NUMEL * 4), (False, freed_bytes), (True, NUMEL * 4)]


def test_mapped_bytes_are_at_the_same_address_and_stay_what_they_are(shared: FileRange) -> None:
    flat = memory()
    address, view = flat.tensor.data_ptr(), flat.tensor[7:20]

    assert flat.map_range(0, NUMEL * 4, shared)
    assert flat.tensor.data_ptr() == address
    assert torch.equal(view, torch.ones(13))
    os.pwrite(shared.descriptor, torch.full((1,), 3.0).numpy().tobytes(), PAGE + 7 * 4)
    assert view[0] == 3.0, "as it is in the file"

    view.fill_(5.0)
    assert set(os.pread(shared.descriptor, 4, PAGE + 4 * 8)) == set(torch.ones(1).numpy().tobytes())
    os.pwrite(shared.descriptor, torch.full((1,), 9.0).numpy().tobytes(), PAGE + 7 * 4)
    assert view[0] == 5.0, "what was written to is this process's own"


def test_after_a_release_the_marks_are_nan_and_the_file_is_as_it_was(shared: FileRange) -> None:
    flat = memory()
    flat.map_range(0, NUMEL * 4, shared)
    flat.free()

    assert flat.tensor[[0, PAGE // 4]].isnan().all()
    assert torch.frombuffer(bytearray(os.pread(shared.descriptor, 8 * PAGE, 0)), dtype=torch.float32).eq(1.0).all()


def test_what_was_copied_keeps_its_values_whatever_the_file_becomes(shared: FileRange) -> None:
    flat = memory()
    flat.map_range(0, NUMEL * 4, shared)
    flat.tensor[1] = 2.0
    expected = flat.tensor.clone()
    flat.copy_mapped()
    os.pwrite(shared.descriptor, bytes(8 * PAGE), 0)

    assert torch.equal(flat.tensor, expected)


@pytest.mark.parametrize(
    ("first", "nbytes", "offset", "is_mapped"),
    [
        (0, PAGE, 0, True),
        (PAGE, PAGE, PAGE, True),
        (2 * PAGE, NUMEL * 4 - 2 * PAGE, 0, True),  # The range ends with the buffer, whose last page is not whole.
        (64, PAGE, 0, False),
        (0, PAGE + 64, 0, False),  # Elements behind the range share its last page.
        (0, PAGE, 64, False),
    ],
)
def test_only_whole_pages_are_mapped(
    shared: FileRange, first: int, nbytes: int, offset: int, *, is_mapped: bool
) -> None:
    flat = memory()
    flat.tensor.fill_(7.0)

    assert flat.map_range(first, nbytes, FileRange(descriptor=shared.descriptor, offset=offset)) is is_mapped
    ones = flat.tensor.eq(1.0)
    assert ones[first // 4 : (first + nbytes) // 4].all() if is_mapped else not ones.any()
    assert flat.tensor.eq(7.0).sum() == NUMEL - (nbytes // 4 if is_mapped else 0)


def test_a_refusal_of_the_kernel_is_an_error_and_changes_nothing() -> None:
    flat = memory()
    flat.tensor.fill_(7.0)
    with pytest.raises(OSError, match=f"mmap of {PAGE} bytes"):
        map_file_at(flat.tensor.data_ptr(), PAGE, FileRange(descriptor=-1, offset=0))

    assert flat.tensor.eq(7.0).all()


def test_changed_bytes_are_found_where_they_are_mapped_and_where_they_are_copies(shared: FileRange) -> None:
    """The first page is mapped, the rest is a copy."""
    flat = memory()
    assert flat.map_range(0, PAGE, shared)
    flat.tensor[PAGE // 4 :] = 2.0
    parts = [slice(0, PAGE // 2), slice(PAGE // 2, 2 * PAGE), slice(2 * PAGE, NUMEL * 4)]
    before = [flat.digest(part) for part in parts]

    assert list(flat.find_changed(parts)) == []
    flat.tensor.mul_(1.0)
    assert (list(flat.find_changed(parts)), [flat.digest(part) for part in parts]) == ([], before)
    flat.tensor.numpy()[3] = 5.0
    assert list(flat.find_changed(parts)) == [0]
    flat.tensor[PAGE // 8 : PAGE // 4 + 1] = -1.0
    assert list(flat.find_changed(parts)) == [0, 1]
    assert [now == then for now, then in zip((flat.digest(part) for part in parts), before, strict=True)] == [
        True,
        False,
        True,
    ]


def test_without_the_kernels_map_of_pages_all_mapped_bytes_are_compared(
    shared: FileRange, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mapping, "_PAGE_MAP", tmp_path / "none")
    flat = memory()
    assert flat.map_range(0, NUMEL * 4, shared)

    assert list(flat.find_changed([slice(0, PAGE), slice(PAGE, NUMEL * 4)])) == []
    flat.tensor[-1] = 0.0
    assert list(flat.find_changed([slice(0, PAGE), slice(PAGE, NUMEL * 4)])) == [1]
