"""After any failure within an engine its leases are released, and the following steps give the bits of a run without
the failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import trainer_client
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.equality import assert_equal
from tests.integration.support.failing import Failing, failing_tower, inputs
from tests.integration.support.waiting import wait_until
from trainer_client import Engine, StoreClientSync
from trainer_client.errors import PhaseError
from trainer_client.training.step.phases import Phase

STEPS = 3
# Each way differs in how units are gathered and in where the states are stored, because each of them has its own code
# that can fail.
WAYS: dict[str, dict[str, Any]] = {
    "mapped": {"device": "cpu"},
    "mapped-nvme": {"device": "nvme"},
    "collective": {"device": "cpu", "gather": "collective"},
    "streams": {"device": "cpu", "prefer_streams": True},
    "kept": {"device": "cpu", "stage3_max_live_parameters": 1 << 20},
    "stage-2": {"device": "cpu", "stage": 2},
    "on-device": {"device": "none"},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {"host_budget": "32MiB", "nvme_budget": "256MiB"}
    with Daemon(tmp_path_factory.mktemp("failures") / "state", config) as daemon:
        yield daemon.address
        assert "Traceback" not in daemon.log, daemon.log


def start(address: str, job: str, way: str, **section: Any) -> Engine:
    asked = dict(WAYS[way])
    offload = {"device": asked.pop("device")}
    streams = asked.pop("prefer_streams", False)
    gather = asked.pop("gather", "auto")
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": offload} | asked
    if zero["stage"] == 3:
        zero["offload_param"] = offload
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": zero,
        "paramserver": {"address": address, "job": job, "gather": gather, **section},
    }
    return trainer_client.initialize(model=failing_tower(), config=config, prefer_streams=streams)[0]


def finish(engine: Engine) -> dict[str, torch.Tensor]:
    """Train until the engine has made STEPS steps, and return the weights."""
    while engine.global_steps < STEPS:
        engine.backward(engine(inputs(engine.global_steps)))
        engine.step()
    return engine.full_state_dict()


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """The weights after STEPS steps in plain PyTorch, which the engine must reach bit for bit."""
    model = failing_tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        model(inputs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def leased_bytes(address: str) -> int:
    return tiers(address)[0].leased_bytes


def assert_nothing_is_leased(address: str) -> None:
    """Wait until no bytes are leased. The engine releases leases without waiting for the store's answer."""
    wait_until(lambda: leased_bytes(address) == 0)


def fail_each_call(act: Callable[[], Any], after: Callable[[], None] = lambda: None) -> Any:
    """Call `act` repeatedly, each time with the next operation of torch in it failing, until no operation is left to
    fail. Return the result of the call that succeeds. `after` is called after each failure."""
    for call in itertools.count(1):
        try:
            with Failing(call):
                return act()
        except torch.OutOfMemoryError:
            after()
    return None


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_may_fail_anywhere(store: str, expected: dict[str, torch.Tensor], way: str) -> None:
    """A forward that failed can be repeated, wherever it failed: also in the gather or release of a unit, with
    gradients or without, and between a forward and its backward."""
    failures = 0
    with start(store, f"forward-{way}", way) as engine:

        def after() -> None:
            nonlocal failures
            failures += 1
            assert engine._hooks.phase is Phase.IDLE
            if failures % 7 == 0:
                assert_nothing_is_leased(store)

        def evaluate() -> None:
            with torch.no_grad():
                engine(batch)

        for step in range(2):
            batch = inputs(step)
            # Each gather takes long over streams, so this step is made without failures.
            if step == 0 and way == "streams":
                engine.backward(engine(batch))
                engine.step()
                continue
            fail_each_call(evaluate, after)
            # In this way units stay gathered after a forward that succeeds.
            if way != "kept":
                assert_nothing_is_leased(store)
            loss = fail_each_call(partial(engine, batch), after)
            fail_each_call(evaluate)
            engine.backward(loss)
            engine.step()
        assert_equal(finish(engine), expected)
        assert_nothing_is_leased(store)
    assert failures > 50


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["mapped", "mapped-nvme", "collective"])
def test_a_module_may_raise_in_its_forward(
    store: str, expected: dict[str, torch.Tensor], way: str, error: type[BaseException]
) -> None:
    with start(store, f"module-{way}-{error.__name__}", way) as engine:
        for block in engine.module.blocks:
            for grad, call in itertools.product((False, True), (engine, engine.module)):
                block.fails = error
                with pytest.raises(error, match="as told"), torch.set_grad_enabled(grad):
                    call(inputs(0))
                if call is engine or error is ArithmeticError:
                    # torch calls no hook when KeyboardInterrupt ends a module's forward. The engine notices it in its
                    # next call.
                    assert_nothing_is_leased(store)
            engine.backward(engine(inputs(engine.global_steps)))
            engine.step()
        assert_equal(finish(engine), expected)


def fail_in_backward(call: int) -> Callable[[Engine], None]:
    def act(engine: Engine) -> None:
        loss = engine(inputs(engine.global_steps))
        with Failing(call):
            engine.backward(loss)

    return act


def fail_in_step(call: int) -> Callable[[Engine], None]:
    def act(engine: Engine) -> None:
        engine.backward(engine(inputs(engine.global_steps)))
        with Failing(call):
            engine.step()

    return act


def interrupt_backward(engine: Engine) -> None:
    engine.module.blocks[1].fails_in_backward = KeyboardInterrupt
    engine.backward(engine(inputs(engine.global_steps)))


def fail_in_change(engine: Engine) -> None:
    weight = engine.get_full("first.weight", "param")
    assert weight is not None
    with Failing(12):
        engine.set_many({(f"blocks.{i}.linear.weight", "param"): weight for i in range(3)})


@pytest.mark.parametrize(
    "fail",
    [
        *(pytest.param(fail_in_backward(call), id=f"backward-{call}") for call in (8, 25, 50, 70)),
        *(pytest.param(fail_in_step(call), id=f"step-{call}") for call in (1, 6, 14)),
        pytest.param(interrupt_backward, id="interrupt"),
        pytest.param(fail_in_change, id="change"),
    ],
)
@pytest.mark.parametrize("way", ["mapped", "collective", "stage-2"])
def test_what_cannot_be_repeated_says_so_and_holds_nothing(
    store: str,
    expected: dict[str, torch.Tensor],
    request: pytest.FixtureRequest,
    way: str,
    fail: Callable[[Engine], None],
) -> None:
    """After the failure the engine refuses all calls. A restarted job goes on from its last commit, with the bits of a
    run without the failure."""
    job = f"restart-{request.node.callspec.id}"
    with start(store, job, way) as engine:
        engine.backward(engine(inputs(0)))
        engine.step()
        with pytest.raises((torch.OutOfMemoryError, KeyboardInterrupt), match="as told"):
            fail(engine)
        assert_nothing_is_leased(store)
        for verb in (engine.step, lambda: engine(inputs(1)), lambda: engine.module(inputs(1)), engine.full_state_dict):
            with pytest.raises(PhaseError, match="restart the job"):
                verb()
        engine.close_without_commit()
    with start(store, job, way) as engine:
        assert engine.resumed_step in (1, 2)
        assert_equal(finish(engine), expected)


@pytest.mark.parametrize("way", ["mapped", "mapped-nvme", "collective", "streams"])
def test_access_to_parameters_may_fail_anywhere(store: str, expected: dict[str, torch.Tensor], way: str) -> None:
    with start(store, f"access-{way}", way) as engine:
        finish(engine)

        def read() -> torch.Tensor:
            with engine.gathered(engine.module.blocks):
                assert engine.get_full("blocks.1.linear.weight", "exp_avg") is not None
                weight: torch.Tensor = engine.module.blocks[1].linear.weight.detach().clone()
            return weight

        weight = fail_each_call(read)
        assert_nothing_is_leased(store)
        assert torch.equal(weight, expected["blocks.1.linear.weight"])
        fail_each_call(engine.full_state_dict)
        assert_nothing_is_leased(store)
        assert_equal(engine.full_state_dict(), expected)


@pytest.mark.parametrize("streams", [False, True])
def test_puts_and_gets_of_the_store_client_may_fail_anywhere(store: str, streams: bool) -> None:
    values = {"large": torch.arange(300_000.0), "small": torch.arange(7.0)}
    with StoreClientSync.connect(store, prefer_streams=streams) as client:
        with client.open(f"client-{streams}", values, shard_bytes=1 << 19) as writer:

            def put() -> None:
                writer.roll_back()
                writer.put(values)

            fail_each_call(put)
            assert_nothing_is_leased(store)
            writer.commit()
        with client.read(f"client-{streams}") as reader:
            for fqn, value in values.items():
                assert torch.equal(fail_each_call(partial(reader.get, fqn)), value)
                assert_nothing_is_leased(store)
