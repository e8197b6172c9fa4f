"""The heap gives freed memory back to the kernel although small blocks lie between the freed ones."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# glibc maps blocks from this size on at first, and takes smaller ones from its heap.
MOST_IN_HEAP_BYTES = 128 << 10
BLOCKS = 1000

# A process of its own, whose heap no other test has filled.
PROGRAM = f"""
import ctypes
from trainer_client.base.own_memory import private_bytes
from trainer_client.training.step.heap_trimmer import HeapTrimmer

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
trimmer = HeapTrimmer()
start = private_bytes()
blocks, nbytes = [], {MOST_IN_HEAP_BYTES} - 4096
for _ in range({BLOCKS}):
    blocks.append(libc.malloc(nbytes))
    ctypes.memset(blocks[-1], 1, nbytes)
    libc.malloc(2000)
full = private_bytes()
trimmer.trim_if_grown()
in_use = private_bytes()
for block in blocks:
    libc.free(ctypes.c_void_p(block))
freed = private_bytes()
trimmer.trim_if_grown()
unseen = private_bytes()
ballast = b"1" * (96 << 20)
trimmer.trim_if_grown()
print(*(value - start for value in (full, in_use, freed, unseen, private_bytes() - len(ballast))))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_the_holes_between_blocks_in_use_go_back_to_the_kernel_when_the_process_has_grown() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, in_use, freed, unseen, returned = map(int, run.stdout.split())

    most = BLOCKS * MOST_IN_HEAP_BYTES
    assert full > 0.9 * most
    assert in_use > 0.9 * most, "what is in use stays"
    assert freed > 0.9 * most, "glibc keeps what lies before a block in use"
    assert unseen > 0.9 * most, "the process has not grown since the last call"
    assert returned < 0.1 * most
