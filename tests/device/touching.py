"""A program that reads the device's memory on the host, which must not survive that."""

from __future__ import annotations

import ctypes

import torch

from tests.device import lag


def main() -> None:
    """Print a number that the device has computed, and then read its memory."""
    lag.load()
    tensor = torch.ones(4, device="lag")
    print(tensor.sum().item(), flush=True)
    ctypes.string_at(tensor.data_ptr(), 4)
    print("the host has read the device's memory")
