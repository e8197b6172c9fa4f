"""The arena is registered with the device's driver once, piece by piece, and never beyond what the store will not move.

The driver is one that records its calls.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.support.waiting import wait_until
from trainer_client.client.transport import pinning
from trainer_client.client.transport.pinning import DRIVERS, PinDriver, PinError, Pins, driver_of, slices_of
from trainer_client.errors import ConfigError

MIB = 1 << 20
PIECE = 2 * MIB
ADDRESS = 1 << 40


class RecordedDriver:
    """A driver that registers nothing and records the calls. `fails_at` is the number of the registration that fails.

    A copy succeeds only within one registration, as with CUDA.
    """

    def __init__(self, fails_at: int = -1, on_unregister: Callable[[], None] = lambda: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self.driver = PinDriver(register=self._register, unregister=self._unregister, synchronize=self._synchronize)
        self._fails_at = fails_at
        self._on_unregister = on_unregister

    def copy(self, address: int, nbytes: int) -> None:
        """Copy as a device does, which refuses memory that is not in exactly one registration."""
        assert any(begin <= address and address + nbytes <= begin + size for begin, size in self.registered.items())

    def _register(self, address: int, nbytes: int) -> None:
        self.calls.append(("register", address, nbytes))
        if len(self.registered) == self._fails_at:
            raise PinError("cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.registered[address] = nbytes

    def _unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))
        self._on_unregister()
        del self.registered[address]

    def _synchronize(self) -> None:
        self.calls.append(("synchronize",))


def pins_of(recorded: RecordedDriver, nbytes: int, settled: int | None = None) -> Pins:
    return Pins(recorded.driver, ADDRESS, nbytes, lambda: nbytes if settled is None else settled, PIECE)


def test_pieces_are_registered_in_order_and_ended_in_reverse() -> None:
    recorded = RecordedDriver()
    pins = pins_of(recorded, 5 * MIB)
    pins.wait()
    assert recorded.calls == [
        ("register", ADDRESS, 2 * MIB),
        ("register", ADDRESS + 2 * MIB, 2 * MIB),
        ("register", ADDRESS + 4 * MIB, MIB),
    ]
    recorded.calls.clear()
    pins.close()
    assert recorded.calls == [("unregister", ADDRESS + offset * MIB) for offset in (4, 2, 0)]
    assert not recorded.registered and not pins.is_pinned(0, 1)


def test_each_piece_of_a_copy_lies_in_one_registration_and_none_is_lost() -> None:
    recorded = RecordedDriver()
    pins = pins_of(recorded, 7 * MIB)
    pins.wait()
    for offset, nbytes in ((0, 1), (4096, 2 * MIB), (MIB, 6 * MIB), (2 * MIB, 2 * MIB), (2 * MIB - 4096, 4097)):
        assert pins.is_pinned(offset, nbytes)
        pieces = list(pins.pieces(offset, nbytes))
        for begin, size in pieces:
            recorded.copy(ADDRESS + begin, size)
        ends = [begin + size for begin, size in pieces]
        assert [begin for begin, _ in pieces] == [offset, *ends[:-1]] and ends[-1] == offset + nbytes
    assert list(pins.pieces(2 * MIB, 2 * MIB)) == [(2 * MIB, 2 * MIB)]
    assert list(pins.pieces(MIB, 0)) == []
    assert not pins.is_pinned(7 * MIB - 1, 2)
    pins.close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_tensor_in_a_registered_mapping_is_cut_where_the_registrations_are(dtype: torch.dtype) -> None:
    recorded = RecordedDriver()
    memory = torch.empty(5 * MIB, dtype=torch.uint8)
    tensor = memory[MIB : 5 * MIB - 4096].view(dtype)
    assert list(slices_of(tensor)) == [slice(0, tensor.numel())]
    pins = Pins(recorded.driver, memory.data_ptr(), memory.numel(), memory.numel, PIECE)
    pins.wait()
    slices = list(slices_of(tensor))
    assert [one.start for one in slices] == [offset * MIB // dtype.itemsize for offset in (0, 1, 3)]
    assert [one.stop for one in slices] == [one.start for one in slices[1:]] + [tensor.numel()]
    for one in slices:
        recorded.copy(tensor[one].data_ptr(), tensor[one].nbytes)
    beside = torch.empty(3 * MIB, dtype=torch.uint8)
    assert list(slices_of(beside)) == [slice(0, 3 * MIB)]
    pins.close()
    assert list(slices_of(tensor)) == [slice(0, tensor.numel())]


def test_what_the_store_may_still_move_is_not_registered() -> None:
    recorded = RecordedDriver()
    settled = [4 * MIB - 1]
    pins = Pins(recorded.driver, ADDRESS, 6 * MIB, lambda: settled[0], PIECE)
    wait_until(lambda: pins.pinned_bytes == 2 * MIB)
    assert not pins.is_pinned(2 * MIB, 1) and len(recorded.registered) == 1
    settled[0] = 6 * MIB
    pins.wait()
    assert pins.pinned_bytes == 6 * MIB
    pins.close()


def test_a_mapping_that_is_closed_early_is_registered_no_further() -> None:
    recorded = RecordedDriver()
    pins = pins_of(recorded, 6 * MIB, settled=2 * MIB)
    wait_until(lambda: pins.pinned_bytes == 2 * MIB)
    pins.close()
    assert recorded.calls == [("register", ADDRESS, 2 * MIB), ("unregister", ADDRESS)]


@pytest.mark.parametrize("fails_at", range(3))
def test_after_a_failure_the_rest_is_not_pinned_and_one_warning_says_what_to_do(
    caplog: pytest.LogCaptureFixture, fails_at: int
) -> None:
    recorded = RecordedDriver(fails_at)
    with caplog.at_level(logging.WARNING):
        pins = pins_of(recorded, 6 * MIB)
        pins.wait()
    assert pins.pinned_bytes == fails_at * PIECE and len(recorded.registered) == fails_at
    assert not pins.is_pinned(fails_at * PIECE, 1)
    (warning,) = caplog.messages
    for part in (f"up to byte {fails_at * PIECE} of {6 * MIB}", "CUDA_ERROR_OUT_OF_MEMORY", "huge_pages", "ulimit -l"):
        assert part in warning
    pins.close()
    assert not recorded.registered


def test_an_end_that_fails_does_not_keep_the_others_from_ending() -> None:
    def refuse() -> None:
        if len(recorded.registered) == 2:
            raise PinError("the driver is shutting down")

    recorded = RecordedDriver(on_unregister=refuse)
    pins = pins_of(recorded, 6 * MIB)
    pins.wait()
    pins.close()
    assert [call[0] for call in recorded.calls].count("unregister") == 3


def test_a_device_is_registered_with_where_it_has_a_driver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = RecordedDriver()
    monkeypatch.setitem(DRIVERS, "xpu", lambda device: recorded.driver)
    assert driver_of(torch.device("xpu", 0), "auto") is recorded.driver
    assert driver_of(torch.device("xpu", 0), True) is recorded.driver
    assert driver_of(torch.device("xpu", 0), False) is None
    assert driver_of(torch.device("cpu"), "auto") is None and not caplog.messages
    with pytest.raises(ConfigError, match=r"pin_arena is true, and this rank's device is cpu.*write 'auto' or false"):
        driver_of(torch.device("cpu"), True)
    assert driver_of(torch.device("mps"), "auto") is None
    assert "is not registered with the device" in caplog.messages[0]


class Library:
    """CUDA's driver as a library of functions that record their names and return `codes` by name, else success."""

    def __init__(self, **codes: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._codes = codes

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
            else:
                self.calls.append((name, *(getattr(argument, "value", None) for argument in arguments)))
            return self._codes.get(name, 0)

        return call


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library], PinDriver]:
    def load(library: Library) -> PinDriver:
        monkeypatch.setattr(pinning, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda _: library}))
        pinning._cuda.cache_clear()
        driver = driver_of(torch.device("cuda", 1), True)
        assert driver is not None
        return driver

    return load


@pytest.fixture(autouse=True)
def _forget_libraries() -> Any:
    yield
    pinning._cuda.cache_clear()


def test_each_call_of_cuda_has_the_primary_context_and_leaves_the_threads_own(
    load: Callable[[Library], PinDriver],
) -> None:
    library = Library()
    driver = load(library)
    assert [name for name, *_ in library.calls] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert library.calls[1][2] == 1
    library.calls.clear()
    driver.register(ADDRESS, PIECE)
    driver.synchronize()
    driver.unregister(ADDRESS)
    around = ["cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"]
    assert [name for name, *_ in library.calls] == [
        *(around[0], "cuMemHostRegister_v2", around[1]),
        *(around[0], "cuCtxSynchronize", around[1]),
        *(around[0], "cuMemHostUnregister", around[1]),
    ]
    portable = 1
    assert library.calls[1][1:] == (ADDRESS, PIECE, portable) and library.calls[7][1:] == (ADDRESS,)


def test_a_refusal_of_cuda_has_its_name_and_the_context_is_restored(load: Callable[[Library], PinDriver]) -> None:
    library = Library(cuMemHostRegister_v2=712)
    driver = load(library)
    with pytest.raises(
        PinError, match=r"cuMemHostRegister_v2 failed: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"
    ):
        driver.register(ADDRESS, PIECE)
    assert library.calls[-1][0] == "cuCtxPopCurrent_v2"


def test_a_machine_without_the_driver_of_its_device_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pinning, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": missing}))
    assert driver_of(torch.device("cuda", 0), "auto") is None
    (warning,) = caplog.messages
    assert "copies are slow: the CUDA driver cannot be loaded (libcuda.so.1" in warning
    with pytest.raises(ConfigError, match=r"pin_arena is true, and the CUDA driver cannot be loaded"):
        driver_of(torch.device("cuda", 0), True)
