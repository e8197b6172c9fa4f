"""The registration of memory with the CUDA device, for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from storage.tiers.arena import PIECE_BYTES
from trainer_client.client.transport.mapping import map_file
from trainer_client.client.transport.pinning import PinDriver, Pins, driver_of


def cuda_driver() -> PinDriver:
    driver = driver_of(torch.device("cuda", torch.cuda.current_device()), True)
    assert driver is not None
    return driver


@dataclass(frozen=True, slots=True)
class Registered:
    """Shared memory that is registered, as a uint8 tensor."""

    memory: torch.Tensor
    pins: Pins


@contextmanager
def registered(nbytes: int, *, piece_bytes: int = PIECE_BYTES, flags: int = 0) -> Iterator[Registered]:
    """Make shared memory of whole pages, and register it; at the end wait for the device and end the registration.

    `flags` are those of memfd_create, for huge pages.
    """
    descriptor = os.memfd_create("registered", os.MFD_CLOEXEC | flags)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = torch.frombuffer(map_file(descriptor, nbytes), dtype=torch.uint8)
        pins = Pins(cuda_driver(), memory.data_ptr(), nbytes, lambda: nbytes, piece_bytes)
        pins.wait()
        try:
            yield Registered(memory, pins)
        finally:
            pins.synchronize()
            pins.close()
    finally:
        os.close(descriptor)
