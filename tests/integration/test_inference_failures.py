"""Forwards of an engine for inference that are interrupted, run beside each other, or lose their session."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.waiting import wait_until
from trainer_client.errors import SessionEndedError, StoreBudgetError
from trainer_client.inference.units import WeightUnit

WIDTH = 128
UNIT_BYTES = WIDTH * (WIDTH + 1) * 4
# A budget with room for three of the blocks, so that no block stays in memory.
FEW_BYTES = 4 * UNIT_BYTES
INPUTS = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Result:
    """The output of a block, in a tuple within a dataclass."""

    tensors: tuple[torch.Tensor, ...]


class Block(nn.Module):
    """A block that returns a view of its bias beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> Result:
        return Result((torch.tanh(self.linear(hidden)), self.linear.bias[:]))


class Model(nn.Module):
    """A model whose first and last layer share a weight, with parameters that no forward of their owner uses.

    The last layer has two units: its bias, and the weight.
    """

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[Result]]:
        hidden = self.first(inputs) * self.scales[0]
        found = []
        for block in self.blocks:
            found.append(block(hidden))
            hidden = hidden + found[-1].tensors[0]
        return self.last(hidden * self.scales[1]), self.offset[:], found


def config_for(address: str, host_bytes: int | None, job: str = "model") -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "paramserver": {"address": address, "job": job, "inference": {"host_bytes": host_bytes}},
    }


def opened(address: str, host_bytes: int | None, model: nn.Module | None = None, job: str = "model") -> Any:
    return trainer_client.initialize(model=model or Model(), config=config_for(address, host_bytes, job))[0]


def units_of(engine: Any) -> tuple[WeightUnit, ...]:
    units: tuple[WeightUnit, ...] = engine._parts.residency._units
    return units


def in_use(engine: Any) -> list[str]:
    return [unit.name for unit in units_of(engine) if unit.users]


def expected() -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = Model()(INPUTS)[0]
    return output


def end_session(engine: Any) -> None:
    """Have the daemon end the engine's session, as it does when a process was silent for too long."""
    session = engine._parts.weights._mapped[0]
    session.session._stream.close()
    wait_until(lambda: session.has_ended)


def overwrite_store(address: str) -> None:
    """Bring another model into the store's memory, which takes the room of all bytes that no session leases."""
    other = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    with opened(address, None, other, job="other") as engine:
        engine(torch.ones(1, 512))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    # The other model of `overwrite_store` has 12 MiB.
    config = {"host_budget": "16MiB", "nvme_budget": "128MiB", "admission_timeout_seconds": 0.5}
    with Daemon(tmp_path_factory.mktemp("inference") / "state", config) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log, daemon.log


@pytest.mark.parametrize("host_bytes", [None, FEW_BYTES], ids=["stays", "streams"])
def test_an_interrupted_forward_leaves_no_unit_in_use(store: Daemon, host_bytes: int | None) -> None:
    with opened(store.address, host_bytes) as engine:
        for number in range(3):

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            handle = engine.module.blocks[number].linear.register_forward_hook(interrupt)
            # torch calls no hook for this error, also those that are always called.
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                engine.module(INPUTS)
            handle.remove()
        for _ in range(2):
            assert torch.equal(engine(INPUTS)[0], expected())
            assert in_use(engine) == []


@pytest.mark.parametrize("host_bytes", [None, FEW_BYTES], ids=["stays", "streams"])
def test_a_forward_works_again_after_one_that_lost_its_session(store: Daemon, host_bytes: int | None) -> None:
    with opened(store.address, host_bytes) as engine:
        engine(INPUTS)
        handle = engine.module.last.register_forward_pre_hook(lambda *_: end_session(engine))
        with pytest.raises(SessionEndedError):
            engine(INPUTS)
        handle.remove()
        assert in_use(engine) == []
        assert torch.equal(engine(INPUTS)[0], expected())


def test_a_parameter_that_no_forward_of_its_owner_uses_is_fetched_again(store: Daemon) -> None:
    with opened(store.address, None) as engine:
        assert torch.equal(engine(INPUTS)[0], expected())
        end_session(engine)
        overwrite_store(store.address)
        assert torch.equal(engine(INPUTS)[0], expected())


def test_threads_that_call_a_model_at_once_leave_no_unit_in_use(store: Daemon) -> None:
    with opened(store.address, FEW_BYTES) as engine:
        block = engine.module.blocks[2]
        is_within, may_end = threading.Event(), threading.Event()
        outputs: list[torch.Tensor] = []

        def hold(*_: Any) -> None:
            is_within.set()
            assert may_end.wait(30)

        def forward() -> None:
            with torch.no_grad():
                outputs.append(block(INPUTS).tensors[0])

        handle = block.linear.register_forward_hook(hold)
        first, second = (threading.Thread(target=forward) for _ in range(2))
        first.start()
        assert is_within.wait(30)
        # The second thread waits in the block's first hook, while the first thread comes to the last one.
        with engine._parts.residency._lock:
            second.start()
            wait_until(lambda: is_waiting(second))
            may_end.set()
            wait_until(lambda: is_waiting(first) or not first.is_alive())
        for thread in (first, second):
            thread.join(30)
        handle.remove()
        assert torch.equal(*outputs)
        assert torch.equal(engine(INPUTS)[0], expected())
        assert in_use(engine) == []


def is_waiting(thread: threading.Thread) -> bool:
    """Return whether a thread is in a function of the residency, whose lock the caller holds."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and Path(frame.f_code.co_filename).name == "residency.py"


@pytest.mark.parametrize("host_bytes", [None, FEW_BYTES], ids=["stays", "streams"])
def test_what_an_engine_gives_out_is_not_in_the_memory_of_the_store(store: Daemon, host_bytes: int | None) -> None:
    model = Model()
    with opened(store.address, host_bytes) as engine:
        arena = engine._parts.weights._mapped[1]
        begin = ctypes.addressof(ctypes.c_char.from_buffer(arena))

        def is_given_out(tensor: torch.Tensor) -> bool:
            return begin <= tensor.data_ptr() < begin + len(arena)

        _, offset, blocks = engine(INPUTS)
        views = [offset, *(block.tensors[1] for block in blocks)]
        assert not any(map(is_given_out, views))
        state = {} if host_bytes is not None else engine.module.state_dict()
        assert not any(map(is_given_out, state.values()))
    overwrite_store(store.address)
    weights = model.state_dict()
    names = ["offset", *(f"blocks.{number}.linear.bias" for number in range(len(model.blocks)))]
    assert all(torch.equal(view, weights[name]) for view, name in zip(views, names, strict=True))
    assert all(torch.equal(value, weights[name]) for name, value in state.items())


def test_a_request_ahead_that_failed_is_made_again(store: Daemon) -> None:
    large = nn.Sequential(nn.Linear(1024, 1024))
    with opened(store.address, 0, large, job="large") as engine:
        weights, (unit,) = engine._parts.weights, units_of(engine)
        others = nn.Sequential(*(nn.Linear(512, 512) for _ in range(14)))
        with opened(store.address, 15 << 20, others, job="others"):
            fetch = weights.begin(unit.plan)
            with pytest.raises(StoreBudgetError):
                weights.finish(unit.plan, None)
            assert fetch is not None
            wait_until(lambda: fetch.has_failed)
        held = weights.finish(unit.plan, fetch)
        assert held.tensors.keys() == {place.tensor.fqn for place in unit.plan.places}
        weights.release(held)


def test_two_threads_may_ask_for_all_weights_at_once(store: Daemon) -> None:
    with opened(store.address, FEW_BYTES) as engine:
        states: list[dict[str, torch.Tensor]] = []
        inner: list[threading.Thread] = []

        def ask() -> None:
            states.append(engine.full_state_dict())

        def ask_within(*_: Any) -> None:
            # The second thread begins and ends within the first one's look at the names.
            if not inner:
                inner.append(threading.Thread(target=ask))
                inner[0].start()
                inner[0].join(30)

        handle = engine.module.register_state_dict_pre_hook(ask_within)
        ask()
        handle.remove()
        assert len(states) == 2
        with pytest.raises(RuntimeError, match=r"engine\.full_state_dict"):
            engine.module.state_dict()
    # The model refuses nothing for an engine that is closed.
    engine.module.state_dict(keep_vars=True)
    assert not engine.module._state_dict_pre_hooks
