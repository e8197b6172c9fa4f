"""Activations of clients in the store: what the admission lends them, and their way to NVMe and back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from storage.base.errors import DamagedBlockError, DeviceError
from storage.engine import Engine
from storage.memory.parkable import Activation
from tests.unit.storage.builders import MIB, TILED, Fault, Layout, Training, flip, held, on_nvme, opened

# Its gradients and units take 4 MiB of the host budget, and the optimizer's buffers some more.
LAYOUT = Layout(name="kept", numels=TILED, groups=("a", "b", "c"))


async def written(engine: Engine, value: int, nbytes: int, *, job: str = "kept") -> Activation:
    """Return an activation whose bytes are all `value`, and park it."""
    activation = await engine.gradients.allocate_activation(job, "session", nbytes)
    assert activation.arena_range is not None
    engine.host.view(activation.arena_range)[:nbytes] = bytes([value]) * nbytes
    engine.gradients.park(activation)
    return activation


async def content(engine: Engine, activation: Activation) -> set[int]:
    """Bring an activation back, and return the values of its bytes."""
    await engine.gradients.recall(activation)
    assert activation.arena_range is not None
    return set(engine.host.view(activation.arena_range)[: activation.size_bytes])


async def test_activations_are_spilled_oldest_first_and_come_back_with_their_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=24 * MIB, nvme_budget_bytes=512 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        kept = []
        for value in range(32):
            assert engine.admission.admit_activation(training.job, MIB + 5, parks=False) is not None
            kept.append(await written(engine, value, MIB + 5))
            assert engine.host.used_bytes <= engine.host.budget_bytes
        await engine.gradients.close()
        spilled = [activation.arena_range is None for activation in kept]
        # The last ones are needed first, so they are still in host memory.
        assert spilled == sorted(spilled, reverse=True) and 0 < sum(spilled) < len(kept)
        assert engine.gradients.spilled_bytes == engine.gradients.parked_bytes == 0
        assert engine.gradients.spilled_activation_bytes == sum(spilled) * kept[0].nbytes
        for value, activation in reversed(list(enumerate(kept))):
            assert await content(engine, activation) == {value}
            engine.gradients.free(activation)
        await training.hand_over()
        await training.commit(1)
        await training.assert_at(1)
        assert engine.gradients.activation_bytes() == engine.gradients.spilled_activation_bytes == 0
        assert all(account.is_balanced for account in await engine.accountant.take())


async def test_without_room_on_nvme_activations_are_admitted_to_half_of_the_spare_host_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=24 * MIB, nvme_budget_bytes=512 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        admission = engine.admission
        engine.nvme.budget_bytes = engine.nvme.used_bytes + admission._bytes_of_next_steps(engine.nvme)
        kept: list[Activation] = []
        while engine.admission.admit_activation(training.job, MIB, parks=False) is not None:
            kept.append(await written(engine, len(kept), MIB))
        assert 0 < len(kept) < 12
        await engine.gradients.close()
        assert all(activation.arena_range is not None for activation in kept)
        for activation in kept:
            engine.gradients.free(activation)
        await training.hand_over()
        await training.commit(1)


async def test_a_spill_under_way_takes_no_more_of_the_budget_than_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks for the memory of its next activations while a slow device takes the first ones."""
    async with opened(tmp_path, host_budget_bytes=24 * MIB, nvme_budget_bytes=512 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        kept = []
        for value in range(32):
            assert engine.admission.admit_activation(training.job, MIB, parks=False) is not None
            kept.append(await written(engine, value, MIB))
        await engine.gradients.close()
        need = engine.nvme.used_bytes + engine.admission._bytes_of_next_steps(engine.nvme)
        engine.nvme.budget_bytes = need + MIB
        first = next(activation for activation in kept if activation.arena_range is not None)
        with held(monkeypatch, "write_exact"):
            engine.gradients.relieve_jobs({"kept"})
            while not engine.nvme.new_regions:
                await asyncio.sleep(0)
            taken = engine.gradients.taken_bytes(Activation)
            assert engine.admission.admit_activation(training.job, MIB, parks=False) is not None
        await engine.gradients.close()
        assert first.arena_range is None
        assert engine.gradients.spilled_activation_bytes == engine.gradients.taken_bytes(Activation) == taken
        for activation in kept:
            engine.gradients.free(activation)


async def test_room_that_a_device_has_refused_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, host_budget_bytes=24 * MIB, nvme_budget_bytes=512 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        growth = Fault(monkeypatch, "extend")
        growth.fail(DeviceError("read-only file system"))
        kept: list[Activation] = []
        with pytest.raises(DeviceError, match="read-only file system"):
            while engine.admission.admit_activation(training.job, MIB, parks=False) is not None:
                kept.append(await written(engine, len(kept), MIB))
        with pytest.raises(DeviceError, match="read-only file system"):
            engine.admission.admit_activation(training.job, MIB, parks=False)
        growth.heal()
        assert engine.admission.admit_activation(training.job, MIB, parks=False) is not None
        for activation in kept:
            engine.gradients.free(activation)
        await engine.gradients.close()


async def test_an_activation_that_leaves_a_step_no_room_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=24 * MIB, nvme_budget_bytes=512 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        share = engine.admission.admit_activation(training.job, 1, parks=False)
        more = engine.admission.admit_activation(training.job, 1, parks=True)
        assert share is not None and more is not None and share <= more < 24 * MIB
        assert engine.admission.admit_activation(training.job, share, parks=False) == share
        assert engine.admission.admit_activation(training.job, more + 1, parks=True) is None


async def test_a_damaged_activation_is_never_returned(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=24 * MIB, nvme_budget_bytes=512 * MIB) as engine:
        training = await Training(engine, LAYOUT).begin()
        # Room on NVMe is reserved, because this takes more than half of the spare host memory.
        share = engine.admission.admit_activation(training.job, 1, parks=True)
        assert share is not None and engine.admission.admit_activation(training.job, share, parks=True)
        activation = await written(engine, 7, MIB)
        engine.gradients.relieve_jobs({"kept"})
        await engine.gradients.close()
        flip(engine, on_nvme(activation.region).extents[0].offset + 1000)
        with pytest.raises(DamagedBlockError, match="an activation of job 'kept'"):
            await engine.gradients.recall(activation)
        engine.gradients.free(activation)


async def test_a_request_for_an_activation_that_waits_holds_up_no_other_request(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=24 * MIB, nvme_budget_bytes=512 * MIB) as engine:
        free = engine.host.budget_bytes - engine.host.used_bytes
        most = await engine.scratch.allocate("kept", free - 2 * MIB)
        waiting = asyncio.ensure_future(engine.gradients.allocate_activation("kept", "session", 8 * MIB))
        for _ in range(3):
            await asyncio.sleep(0)
        other = await asyncio.wait_for(engine.scratch.allocate("kept", MIB), 20)
        assert not waiting.done()
        # Operators and clients see that it waits.
        assert engine.host.queue_depth == 1
        await asyncio.sleep(0.01)
        assert engine.host.waiting_seconds > 0
        engine.scratch.free(most)
        activation = await waiting
        engine.gradients.free(activation)
        engine.scratch.free(other)
        # A request that is cancelled, before or after it was granted, keeps nothing.
        for is_granted in (False, True):
            most = await engine.scratch.allocate("kept", free - 2 * MIB)
            waiting = asyncio.ensure_future(engine.gradients.allocate_activation("kept", "session", 8 * MIB))
            for _ in range(3):
                await asyncio.sleep(0)
            if is_granted:
                engine.scratch.free(most)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            if not is_granted:
                engine.scratch.free(most)
            assert engine.scratch.nbytes == 0
