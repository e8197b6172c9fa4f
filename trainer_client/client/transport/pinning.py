"""The registration of a mapped arena with the driver of a device, after which the device copies while the host goes on.

Memory that is not registered ("pageable") is copied through buffers of the driver, several times slower, and the host
waits for it. This module owns the registrations of a mapping: once for a process, however many sessions it has. It must
never register what the store may still move, nor end a registration while the device may still copy.

[Note: one registration for a mapping] The driver knows memory by its address, so the registration belongs to the
mapping (arena.py) and not to a session. A device may then write to the leases of every session of the process even
after the process was killed. So each session tells the daemon when it begins (`announce`, and `message Arena` in
parameter_store.proto).

[Note: pieces] Drivers refuse a single registration of 512 GiB, and one call for all of the arena would last a minute
for 500 GiB in ordinary pages. So the arena is registered in pieces, in order, in a thread of its own. A copy must not
cross from one registration into another, nor into memory without one, because drivers refuse that ("invalid
argument"). The store grants no lease that crosses from one piece into another, unless it is longer than a piece.
`Pins.pieces` and `slices_of` cut the copies of such a lease.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from paramserver.contract.sizes import shown_size
from trainer_client.base.log_context import carried
from trainer_client.errors import ConfigError

log = logging.getLogger(__name__)

# The pause between two looks of the registering thread at how far the store has moved the arena into huge pages.
LOOK_SECONDS = 0.1


class PinError(Exception):
    """The driver of a device refuses a call. The error's text names the call, and has the driver's reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinDriver:
    """The calls of a device's driver that registrations need. Each raises PinError if the driver refuses.

    Attributes:
        register: registers memory; takes its address and its size in bytes.
        unregister: ends the registration that begins at an address.
        synchronize: waits until the device has done all that this process has given it.
    """

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]
    synchronize: Callable[[], None]


class Pins:
    """The registrations of one mapped arena. The constructor starts the thread that makes them.

    Attributes:
        pinned_bytes: how many bytes of the arena, from its beginning, are registered.

    Args:
        driver: makes and ends the registrations.
        address: the address of the mapping.
        nbytes: the size of the mapping.
        settled: returns how many bytes of the arena, from its beginning, the store will not move any more.
        piece_bytes: the size of a registration; `Arena.piece_bytes` of the daemon, a multiple of 2 MiB.
    """

    def __init__(
        self, driver: PinDriver, address: int, nbytes: int, settled: Callable[[], int], piece_bytes: int
    ) -> None:
        self.pinned_bytes = 0
        self._driver = driver
        self._address = address
        self._nbytes = nbytes
        self._settled: Callable[[], int] | None = settled
        self._piece_bytes = piece_bytes
        self._closing = threading.Event()
        _Process.pins.append(self)
        self._thread = threading.Thread(target=carried(self._register), name="paramserver-pins", daemon=True)
        self._thread.start()

    def is_pinned(self, offset: int, nbytes: int) -> bool:
        """Return whether the device can copy bytes [offset, offset + nbytes) of the arena while the host goes on."""
        return offset + nbytes <= self.pinned_bytes

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the parts (offset, size) of a range of the arena that are copied one by one, in order.

        No part crosses from one registration into another.
        """
        end = offset + nbytes
        while offset < end:
            part = min(end, (offset // self._piece_bytes + 1) * self._piece_bytes) - offset
            yield offset, part
            offset += part

    def has(self, address: int) -> bool:
        """Return whether a memory address lies in the mapped arena."""
        return self._address <= address < self._address + self._nbytes

    def offset_of(self, address: int) -> int:
        """Return the offset in the arena, in bytes, of a memory address in the mapping."""
        return address - self._address

    def synchronize(self) -> None:
        """Wait until the device has done all that this process has given it. Raise PinError if it cannot."""
        self._driver.synchronize()

    def wait(self) -> None:
        """Wait until the thread that registers the arena has ended, because it has registered all that it can."""
        self._thread.join()

    def close(self) -> None:
        """End the registrations, the last one first. The device must have done all copies. Call this once."""
        self._closing.set()
        self.wait()
        _Process.pins.remove(self)
        # The function `_settled` reads a word of the arena, so it keeps the arena mapped. It is dropped here, because a
        # lease may keep this object alive for long.
        self._settled = None
        begins = range(0, self.pinned_bytes, self._piece_bytes)
        self.pinned_bytes = 0
        for begin in reversed(begins):
            try:
                self._driver.unregister(self._address + begin)
            except PinError as error:
                # The driver refused to end the registration. The error is only logged, because the driver ends all
                # registrations when the process ends.
                log.debug("a registration of the store's memory does not end: %s", error)

    def _register(self) -> None:
        for begin in range(0, self._nbytes, self._piece_bytes):
            end = min(begin + self._piece_bytes, self._nbytes)
            if not self._wait_until_settled(end):
                return
            try:
                self._driver.register(self._address + begin, end - begin)
            except PinError as error:
                log.warning(
                    "the store's shared memory is registered with the device up to byte %d of %d, and copies from and "
                    "to the rest are slow, because the host waits for them: %s. Set huge_pages of the daemon to true, "
                    "which takes less memory of the driver, or raise the limit of locked memory (ulimit -l, or "
                    "LimitMEMLOCK= of systemd) of the trainer; paramserver.pin_arena = false registers nothing",
                    *(begin, self._nbytes, error),
                )
                return
            self.pinned_bytes = end
        log.info("the store's shared memory, %s, is registered with the device", shown_size(self._nbytes))

    def _wait_until_settled(self, end: int) -> bool:
        """Wait until the store will not move the bytes before `end` any more; return False if `close` is called."""
        settled = self._settled
        assert settled is not None
        while not self._closing.is_set():
            if settled() >= end:
                return True
            self._closing.wait(LOOK_SECONDS)
        return False


class _Process:
    """The state of this module for the whole process: whether it may register arenas, and its registrations."""

    announced = False
    pins: ClassVar[list[Pins]] = []


def announce() -> None:
    """Have all sessions that open from now on tell their daemons that this process may register arenas.

    Call this before the first session opens whose arena is to be registered.
    """
    _Process.announced = True


def is_announced() -> bool:
    """Return whether `announce` was called. Each session sends this to its daemon when it begins."""
    return _Process.announced


def slices_of(host: torch.Tensor) -> Iterator[slice]:
    """Yield the slices of a tensor that a device copies one by one, in order; see [Note: pieces].

    A tensor that is not in an arena with registrations is one slice.

    Args:
        host: a 1-D contiguous tensor on the CPU. In an arena, it begins at a multiple of its item size.
    """
    begin = host.data_ptr()
    pins = next((pins for pins in _Process.pins if pins.has(begin)), None)
    if pins is None:
        yield slice(0, host.numel())
        return
    first = pins.offset_of(begin)
    for offset, nbytes in pins.pieces(first, host.nbytes):
        yield slice((offset - first) // host.itemsize, (offset - first + nbytes) // host.itemsize)


# The values of constants in cuda.h, the header of CUDA's driver API.
_PORTABLE = 0x01
_SUCCESS = 0


class _Cuda:
    """CUDA's driver API, as far as registrations need it, with the primary context of one device.

    The runtime's cudaHostRegister is not used, because its failure stays as the last error of the thread, and torch
    would report it for an unrelated kernel. The driver API has no last error. Its calls need a current context, and
    any thread may make them, so each call makes the primary context current and then restores the former one.
    """

    def __init__(self, index: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PinError(f"the CUDA driver cannot be loaded ({error})") from None
        device = ctypes.c_int()
        # The device's primary context, which torch uses, too. It is not released, so it stays until the process ends.
        self._context = ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def register(self, address: int, nbytes: int) -> None:
        self._in_context(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
        )

    def unregister(self, address: int) -> None:
        self._in_context("cuMemHostUnregister", ctypes.c_void_p(address))

    def synchronize(self) -> None:
        self._in_context("cuCtxSynchronize")

    def _in_context(self, name: str, *arguments: object) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver, without the interpreter's lock. It can raise PinError."""
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            raise PinError(f"{name} failed: {self._describe(code)}")

    def _describe(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) != _SUCCESS or text.value is None:
            return f"error {code}"
        return f"{text.value.decode()} ({code})"


@cache
def _cuda(index: int) -> PinDriver:
    cuda = _Cuda(index)
    return PinDriver(register=cuda.register, unregister=cuda.unregister, synchronize=cuda.synchronize)


def _cuda_of(device: torch.device) -> PinDriver:
    return _cuda(torch.cuda.current_device() if device.index is None else device.index)


# The functions that make the driver of a device, by the device's type. A test device adds its own.
DRIVERS: dict[str, Callable[[torch.device], PinDriver]] = {"cuda": _cuda_of}


def driver_of(device: torch.device, setting: str | bool) -> PinDriver | None:
    """Return the driver with which a rank on `device` registers the arena; None if it registers nothing.

    Args:
        device: the device of the rank.
        setting: `paramserver.pin_arena`: "auto", or whether to register.

    Raises:
        ConfigError: `setting` is True, and there is no driver for the device here.
    """
    if setting is False:
        return None
    try:
        if (make := DRIVERS.get(device.type)) is None:
            raise PinError(f"this rank's device is {device}, with which memory cannot be registered")
        return make(device)
    except PinError as error:
        if setting is True:
            raise ConfigError(f"paramserver.pin_arena is true, and {error}: write 'auto' or false") from None
        if device.type != "cpu":
            log.warning("the store's shared memory is not registered with the device, so copies are slow: %s", error)
        return None
