"""The registration of shared memory with a CUDA device. These tests are skipped on a machine without one.

They print what they measure (`pytest -s`), and assert what must hold on any GPU.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable

import pytest
import torch

from storage.base.syscalls import collapse_pages
from tests.gpu.registered import cuda_driver, registered
from trainer_client.client.transport.mapping import map_file
from trainer_client.client.transport.pinning import PinError, Pins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

MIB = 1 << 20
GIB = 1 << 30


def seconds_of(act: Callable[[], object]) -> float:
    """Return the time that `act` takes until the device has done it, the shortest of five."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def test_the_driver_knows_registered_memory_until_its_end() -> None:
    with registered(64 * MIB) as held:
        assert held.pins.pinned_bytes == 64 * MIB and held.memory.is_pinned()
        memory = held.memory
    assert not memory.is_pinned()


def test_a_copy_of_registered_memory_does_not_hold_the_host() -> None:
    with registered(GIB) as held:
        target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        held.memory.random_(0, 256)
        target.copy_(held.memory, non_blocking=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        began = time.perf_counter()
        target.copy_(held.memory, non_blocking=True)
        held.memory.copy_(target, non_blocking=True)
        queued = time.perf_counter() - began
        event = torch.cuda.Event()
        event.record()
        assert not event.query(), "the copies wait behind the kernel, and the host does not"
        print(f"two copies of 1 GiB were queued in {queued * 1e3:.2f} ms")
        event.synchronize()
        assert torch.equal(target.cpu(), held.memory)


def test_a_copy_is_cut_where_two_registrations_meet() -> None:
    piece = 4 * MIB
    with registered(3 * piece, piece_bytes=piece) as held:
        held.memory.random_(0, 256)
        first, nbytes = piece - 4096, piece + 8192
        target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        for offset, size in held.pins.pieces(first, nbytes):
            begin = offset - first
            target[begin : begin + size].copy_(held.memory[offset : offset + size], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(target.cpu(), held.memory[first : first + nbytes])


def test_a_refused_registration_leaves_torch_clean_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    # The second half has no page that may be read, so the driver refuses the second piece.
    reserved = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    begin = -(-address // (2 * MIB)) * (2 * MIB)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(begin + 2 * MIB), ctypes.c_size_t(2 * MIB), ctypes.c_int(0)) == 0
    with caplog.at_level(logging.WARNING):
        pins = Pins(cuda_driver(), begin, 4 * MIB, lambda: 4 * MIB, 2 * MIB)
        pins.wait()
    assert pins.pinned_bytes == 2 * MIB
    (warning,) = caplog.messages
    assert f"up to byte {2 * MIB} of {4 * MIB}" in warning and "CUDA_ERROR" in warning
    # A failure of the runtime's cudaHostRegister would be reported here.
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    torch.cuda.synchronize()
    pins.close()


def test_memory_is_not_registered_twice() -> None:
    with registered(8 * MIB) as held, pytest.raises(PinError, match="ALREADY_REGISTERED"):
        cuda_driver().register(held.memory.data_ptr(), 8 * MIB)


@pytest.mark.parametrize("pages", ["4 KiB", "2 MiB, collapsed", "2 MiB, reserved"])
def test_what_a_registration_costs(pages: str) -> None:
    nbytes = 4 * GIB
    flags = os.MFD_HUGETLB | os.MFD_HUGE_2MB if pages.endswith("reserved") else 0
    try:
        descriptor = os.memfd_create("cost", os.MFD_CLOEXEC | flags)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        pytest.skip(f"this machine does not have 4 GiB in pages of {pages}: {error}")
    if pages.endswith("collapsed"):
        huge = sum(moved for _, moved in collapse_pages(descriptor, nbytes))
        if huge < nbytes:
            pytest.skip(f"only {huge} of {nbytes} bytes could be moved into huge pages")
    memory = torch.frombuffer(map_file(descriptor, nbytes), dtype=torch.uint8)
    os.close(descriptor)
    driver = cuda_driver()
    free, _ = torch.cuda.mem_get_info()
    began = time.perf_counter()
    driver.register(memory.data_ptr(), nbytes)
    took = time.perf_counter() - began
    of_the_gpu = free - torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    driver.unregister(memory.data_ptr())
    print(
        f"{pages}: registered in {took / 4:.3f} s/GiB, ended in {(time.perf_counter() - began) / 4:.3f} s/GiB, "
        f"{of_the_gpu / 4 / MIB:.2f} MiB of the GPU's memory for each GiB"
    )


@pytest.mark.parametrize("mib", [1, 4, 16, 64, 256])
def test_copies_are_as_fast_as_from_torchs_own_pinned_memory(mib: int) -> None:
    nbytes = mib * MIB
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    own = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(nbytes, dtype=torch.uint8)
    with registered(256 * MIB) as held:
        arena = held.memory[:nbytes]
        speeds = {}
        for name, host in (("arena", arena), ("pinned", own), ("pageable", pageable)):
            into = seconds_of(lambda host=host: device.copy_(host, non_blocking=True))  # type: ignore[misc]
            out = seconds_of(lambda host=host: host.copy_(device, non_blocking=True))  # type: ignore[misc]
            speeds[name] = nbytes / into / 1e9, nbytes / out / 1e9
    print(
        f"{mib} MiB: " + ", ".join(f"{name} {into:.1f} in, {out:.1f} out GB/s" for name, (into, out) in speeds.items())
    )
    for arena_speed, own_speed in zip(speeds["arena"], speeds["pinned"], strict=True):
        assert arena_speed >= 0.9 * own_speed
