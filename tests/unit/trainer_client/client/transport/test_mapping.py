"""A mapping shows a file's bytes in this process's memory, in both directions and for as long as a view of it lives."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from trainer_client.client.transport.mapping import map_file

MIB = 1 << 20


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("mapped")
    os.ftruncate(descriptor, 5 * MIB)
    yield descriptor
    os.close(descriptor)


def test_a_file_is_shared_in_both_directions_from_a_multiple_of_a_huge_page_on(descriptor: int) -> None:
    memory = map_file(descriptor, 5 * MIB)

    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 * MIB) == 0
    memory[-3:] = b"end"
    assert os.pread(descriptor, 10, 5 * MIB - 3) == b"end"
    os.pwrite(descriptor, b"begin", 0)
    assert bytes(memory[:5]) == b"begin"


def test_the_mapping_stays_as_long_as_a_view_of_it(descriptor: int) -> None:
    view = map_file(descriptor, 5 * MIB)[4 * MIB :]

    os.pwrite(descriptor, b"later", 4 * MIB)

    assert bytes(view[:5]) == b"later"


def test_more_than_there_is_is_refused(descriptor: int) -> None:
    with pytest.raises(ValueError, match=f"the file has {5 * MIB} bytes, and {5 * MIB + 1} are to be mapped"):
        map_file(descriptor, 5 * MIB + 1)
