"""The store's shared memory, registered with the device: copies from and to it are late, and a client that leaves waits
for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind
from tests.device import lag
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.stopped_client import attach
from tests.integration.support.store_client import Clients
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.mapping import map_file
from trainer_client.client.transport.pinning import DRIVERS, PinDriver, PinError, Pins, driver_of, slices_of
from trainer_client.client.transport.rank_store import RankStore

DEVICE = torch.device("lag", 0)
MIB = 1 << 20
MARK = 0xAB


def _make_driver(_: torch.device) -> PinDriver:
    """Return the driver of the simulated device, whose codes are CUDA's."""

    def checked(code: int) -> None:
        if code != 0:
            raise PinError(f"error {code}")

    return PinDriver(
        register=lambda address, nbytes: checked(lag.register_host(address, nbytes)),
        unregister=lambda address: checked(lag.unregister_host(address)),
        synchronize=lag.synchronize,
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PinDriver:
    monkeypatch.setitem(DRIVERS, "lag", _make_driver)
    driver = driver_of(DEVICE, "auto")
    assert driver is not None
    return driver


@pytest.fixture
def memory() -> Iterator[torch.Tensor]:
    descriptor = os.memfd_create("memory")
    os.posix_fallocate(descriptor, 0, 6 * MIB)
    yield torch.frombuffer(map_file(descriptor, 6 * MIB), dtype=torch.uint8)
    os.close(descriptor)


def test_a_copy_over_several_registrations_is_cut_for_the_device(driver: PinDriver, memory: torch.Tensor) -> None:
    lag.set_lag(lag.ENDLESS)
    before = lag.registered_bytes()
    pins = Pins(driver, memory.data_ptr(), memory.numel(), memory.numel, 2 * MIB)
    pins.wait()
    assert pins.pinned_bytes == lag.registered_bytes() - before == memory.numel()
    memory.random_(0, 256)
    part = memory[MIB : 5 * MIB + 4096]
    target = torch.zeros(part.numel(), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(RuntimeError, match="registration"):
        target.copy_(part, non_blocking=True)
    for one in slices_of(part):
        target[one].copy_(part[one], non_blocking=True)
    assert not torch.accelerator.current_stream().query(), "the host has not waited"
    assert torch.equal(target.cpu(), part)
    pins.synchronize()
    pins.close()
    assert lag.registered_bytes() == before


def test_a_registration_that_is_refused_leaves_copies_right_and_synchronous(
    driver: PinDriver, memory: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    lag.set_lag(lag.ENDLESS)
    lag.fail_registrations(1)
    pins = Pins(driver, memory.data_ptr(), memory.numel(), memory.numel, 2 * MIB)
    pins.wait()
    assert pins.pinned_bytes == 0 and "up to byte 0 of" in caplog.messages[0]
    target = memory.to(DEVICE, non_blocking=True)
    assert torch.accelerator.current_stream().query()
    assert torch.equal(target.cpu(), memory)
    pins.close()


def test_a_client_that_leaves_waits_for_late_copies_into_its_lease(driver: PinDriver, tmp_path: Path) -> None:
    layout = Layout(name="job")
    config = {"late_copy_seconds": 600.0, "session_grace_seconds": 0.2}
    with Daemon(tmp_path / "state", config) as daemon, Clients(daemon.address) as clients:
        clients.rank(layout, run_id="first").begin().close()
        store = RankStore(daemon.address, "late", driver=driver)
        attach(store, layout)
        leased = store.gradients.acquire(SlabName(group=layout.groups[0], kind=pb.KIND_GRAD), 1).wait()
        assert leased.place is not None
        leased.place.pins.wait()
        assert leased.is_pinned
        leased.data.zero_()
        # Another mapping, through which the bytes can be seen when this session is over.
        watcher = clients.client().map_arena()
        mine = slice(leased.place.offset, leased.place.offset + leased.data.numel())
        values = torch.full_like(leased.data, MARK, device=DEVICE)
        lag.set_lag(lag.ENDLESS)
        for one in leased.pieces():
            leased.data[one].copy_(values[one], non_blocking=True)
        assert not any(watcher[mine]), "the copy is late"
        # The view goes, and with it all that Python knows of the copy.
        del leased
        store.close()
        assert lag.registered_bytes() == 0
        assert set(watcher[mine]) == {MARK}, "the device has done its copies before the session's lock was released"
        wait_until(lambda: tiers(daemon.address)[0].leased_bytes == 0)
        assert tiers(daemon.address)[0].quarantined_bytes == 0, "a client that leaves in order leaves nothing behind"


def test_a_rank_votes_behind_its_last_copy(driver: PinDriver, tmp_path: Path) -> None:
    layout = Layout(name="job")
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        clients.rank(layout, run_id="first").begin().close()
        store = RankStore(daemon.address, "late", driver=driver)
        rank = clients.rank(layout, run_id="second")
        own, rank.session_id = rank.session_id, store.session_id
        rank.resume()
        read = store.leases.acquire_read([SlabName(group=layout.groups[0], kind=pb.KIND_PARAM)], 0).wait()[0]
        assert read.place is not None
        read.place.pins.wait()
        lag.set_lag(lag.ENDLESS)
        target = torch.empty_like(read.data, device=DEVICE)
        target.copy_(read.data, non_blocking=True)
        done = torch.accelerator.current_stream().record_event()
        was_done = []

        def wait_for_copies() -> None:
            was_done.append(done.query())
            done.synchronize()

        store.leases.release([read]).wait()
        for group in rank.groups:
            rank.apply(1, rank.acquire(group, Kind.GRAD, pb.LEASE_MODE_WRITE, step=1), group=group)
        store.steps.commit(1, b"0:1", 0, wait_for_copies=wait_for_copies).wait()
        assert was_done == [False] and done.query()
        rank.session_id = own
        del read
        store.close()
