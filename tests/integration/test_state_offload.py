"""States that move from the device into host memory and back keep their bits, and nothing uses them meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.support.checkpoint_ranks import batch, config_of, start, steps
from trainer_client import Engine, zero
from trainer_client.errors import ConfigError, PhaseError, ReleasedParameterError
from trainer_client.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from trainer_client.runtime.zero.offload_states import get_state_devices
from trainer_client.training.run import state_offload
from trainer_client.training.run.device_copies import CopyRoom
from trainer_client.training.run.state_offload import DeviceState

PLACEMENTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 2, optimizer in host memory": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3": {"stage": 3},
    "stage 3, all in host memory": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def begin(address: str, job: str, placement: str) -> Engine:
    torch.manual_seed(3)
    config = config_of(address, job, half=True) | {"zero_optimization": PLACEMENTS[placement]}
    return start(config)


def backward(engine: Engine) -> None:
    engine.backward(engine(batch(engine.global_steps).bfloat16()))


def held_bytes(engine: Engine) -> int:
    """Return the bytes that the engine's states and gradients have on its device."""
    tensors = [
        tensor for state in engine._loop.parts.states for tensor in (*state.held.values(), *own_parameters(state))
    ]
    tensors += engine._device_room._offload._gradients.on_device()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def own_parameters(state: Any) -> list[torch.Tensor]:
    return [] if state.group.partition is None else [state.group.partition]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_states_move_away_and_back_and_keep_their_bits(model_store: str, job: str, placement: str) -> None:
    with begin(model_store, f"{job} stays", placement) as engine:
        expected = list(steps(engine, 3))
        weights = engine.full_state_dict()
    with begin(model_store, f"{job} moves", placement) as engine:
        losses = list(steps(engine, 1))
        before = held_bytes(engine)
        weight = next(engine.module.parameters())
        engine.offload_states()
        for kind in (DeviceState.optim_states, DeviceState.hp_params, DeviceState.lp_params):
            assert get_state_devices(engine, kind) == {torch.device("cpu")}
        assert get_state_devices(engine, OffloadStateTypeEnum.contiguous_grad_buffer) == set()
        for refused in (lambda: engine(batch(1).bfloat16()), lambda: engine.module(batch(1).bfloat16()), engine.step):
            with pytest.raises(PhaseError, match=r"call engine\.reload_states\(\) first"):
                refused()
        with pytest.raises((ReleasedParameterError, RuntimeError)):
            weight.sum()
        engine.reload_states()
        assert held_bytes(engine) == before
        losses += list(steps(engine, 2))

        # The gradients of the step move, too.
        loss = engine(batch(engine.global_steps).bfloat16())
        engine.backward(loss)
        gradients = engine.get_full("first.weight", "grad")
        engine.offload_states(include=[OffloadStateTypeEnum.lp_grads], device=OffloadDeviceEnum.cpu)
        engine.offload_states(include=[OffloadStateTypeEnum.hp_params], non_blocking=True)
        engine.reload_states(non_blocking=True)
        again = engine.get_full("first.weight", "grad")
        assert gradients is not None and again is not None and torch.equal(gradients, again)
        engine.step()
        assert [*losses, loss.item()] == expected
        found = engine.full_state_dict()
    assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []


def test_the_memory_of_what_has_moved_is_freed(model_store: str, job: str) -> None:
    with begin(model_store, job, "stage 3") as engine:
        backward(engine)
        assert held_bytes(engine) > 0
        engine.offload_states()
        assert held_bytes(engine) == 0
        # An engine that is closed meanwhile commits as usual.
    with begin(model_store, job, "stage 3") as engine:
        assert engine.global_steps == 0


def test_what_found_no_room_on_the_device_is_brought_back_later(
    model_store: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may still have the device's memory when the states are to come back."""
    with begin(model_store, job, "stage 3") as engine:
        losses = list(steps(engine, 1))
        weights, before = engine.full_state_dict(), held_bytes(engine)
        engine.offload_states()
        resize, calls = state_offload._resize, iter(range(100))

        def without_room(storage: torch.UntypedStorage, nbytes: int) -> None:
            if next(calls) == 2:
                raise torch.OutOfMemoryError("planted")
            resize(storage, nbytes)

        with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError, match="planted"):
            patched.setattr(state_offload, "_resize", without_room)
            engine.reload_states()
        with pytest.raises(PhaseError):
            engine(batch(1).bfloat16())
        engine.reload_states()
        assert held_bytes(engine) == before
        found = engine.full_state_dict()
        assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []
        losses += list(steps(engine, 3))
    with begin(model_store, f"{job} stays", "stage 3") as engine:
        assert list(steps(engine, 3)) == losses


def test_a_second_move_that_fails_brings_the_states_of_the_first_one_back(
    model_store: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: CopyRoom) -> None:
        raise MemoryError("planted")

    with begin(model_store, job, "stage 3") as engine:
        losses = list(steps(engine, 1))
        before = held_bytes(engine)
        engine.offload_states(include=[DeviceState.hp_params])
        with monkeypatch.context() as patched, pytest.raises(MemoryError, match="planted"):
            patched.setattr(CopyRoom, "withdraw", fail)
            engine.offload_states()
        assert held_bytes(engine) == before
        losses += list(steps(engine, 3))
    with begin(model_store, f"{job} stays", "stage 3") as engine:
        assert list(steps(engine, 3)) == losses


def test_misuse_is_refused(model_store: str, job: str) -> None:
    with begin(model_store, job, "stage 2") as engine:
        engine.reload_states()
        with pytest.raises(ConfigError, match=r"offload_states\(device='nvme'\): states can be moved to 'cpu' only"):
            engine.offload_states(device="nvme")
        with zero.GatheredParameters(engine.module.parameters()), pytest.raises(RuntimeError, match="within gathered"):
            engine.offload_states()
        loss = engine(batch(0).bfloat16())
        with pytest.raises(PhaseError, match="its backward is to come"):
            engine.offload_states()
        engine.backward(loss)
        engine.step()
