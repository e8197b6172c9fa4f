"""Loops that were written for torch: they call `loss.backward()`, `optimizer.step()` and `optimizer.zero_grad()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tests.integration.support.model_runs import build, config_of, optimizer_of, start
from tests.integration.support.training import Run, assert_bit_equal, launch, micro_batches
from tests.integration.support.zoo import ZOO
from trainer_client import Engine
from trainer_client.errors import ConfigError, PhaseError, ReleasedParameterError
from trainer_client.training.model.released import ReleasedParameter

BATCHES = list(micro_batches(4))
pytestmark = [
    # torch warns about the inputs of reentrant checkpointing under no_grad.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]


class Plain:
    """A plain model in a loop of torch's verbs."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.optimizer = optimizer_of(model)

    def __call__(self, **batch: torch.Tensor) -> Any:
        return self.module(**batch)


def assert_same_as_plain(model: nn.Module, act: Any, address: str, job: str, **keys: Any) -> None:
    """Assert that the generator function `act` yields the same numbers with an engine as with a plain model."""
    torch.manual_seed(2)
    reference = Plain(deepcopy(model))
    expected = [value.detach().clone() for value in act(reference)]
    torch.manual_seed(2)
    with start(model, config_of(address, job) | keys) as engine:
        actual = [value.detach().clone() for value in act(engine)]
        weights = engine.full_state_dict()
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * len(expected)
    plain = reference.module.state_dict()
    assert [name for name, value in plain.items() if not torch.equal(value, weights[name])] == []


def gathered(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not isinstance(p, ReleasedParameter)]


@pytest.mark.parametrize("name", ["gpt2-zoo", "t5", "external", "checkpointed", "checkpointed-reentrant"])
def test_a_loop_of_torch_trains_as_without_the_engine(model_store: str, name: str) -> None:
    def act(engine: Any) -> Iterator[torch.Tensor]:
        for batch in BATCHES:
            engine.optimizer.zero_grad()
            loss = engine(input_ids=batch, labels=batch).loss
            loss.backward()
            engine.optimizer.step()
            yield loss

    assert_same_as_plain(build(name), act, model_store, f"torch-loop-{name}")


def test_several_losses_and_outputs_that_are_no_scalars(model_store: str) -> None:
    """One forward has two losses, another one an output with a gradient of its own, and a third a loss outside."""

    def act(engine: Any) -> Iterator[torch.Tensor]:
        first, second = BATCHES[:2]
        for _ in range(2):
            output = engine(input_ids=first, labels=first)
            output.loss.backward(retain_graph=True)
            output.logits.square().mean().backward()
            logits = engine(input_ids=second).logits
            logits.backward(torch.ones_like(logits) / logits.numel())
            criterion = nn.functional.cross_entropy(engine(input_ids=second).logits.flatten(0, 1), second.flatten())
            criterion.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            yield from (output.loss, criterion)

    assert_same_as_plain(build("gpt2-zoo"), act, model_store, "torch-losses")


def test_gradients_that_the_user_drops_count_for_nothing(model_store: str) -> None:
    def act(engine: Any) -> Iterator[torch.Tensor]:
        for batch in BATCHES[:3]:
            engine(input_ids=BATCHES[3], labels=BATCHES[3]).loss.backward()
            engine.optimizer.zero_grad()
            loss = engine(input_ids=batch, labels=batch).loss
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            yield loss

    assert_same_as_plain(build("gpt2-zoo"), act, model_store, "torch-dropped")


class FailingBackward(torch.autograd.Function):
    """Returns its input, and raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("as told")


def fail_in_backward(_: nn.Module, __: Any, output: Any) -> Any:
    value: torch.Tensor = FailingBackward.apply(output)  # type: ignore[no-untyped-call]
    return value


@pytest.mark.parametrize("verb", ["forward", "backward", "step", "model"])
def test_a_backward_pass_of_the_users_that_fails_ends_the_run_and_says_so(model_store: str, verb: str) -> None:
    model, batch = build("gpt2-zoo"), BATCHES[0]
    with start(model, config_of(model_store, f"torch-fails-{verb}")) as engine:
        model.transformer.h[0].register_forward_hook(fail_in_backward)
        loss = engine(input_ids=batch, labels=batch).loss
        with pytest.raises(ArithmeticError):
            loss.backward()
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: engine(input_ids=batch),
            "backward": lambda: engine.backward(loss),
            "step": engine.step,
            "model": lambda: model(input_ids=batch),
        }
        with pytest.raises(PhaseError):
            calls[verb]()
        with pytest.raises(PhaseError, match="restart the job"):
            engine.step()
        assert gathered(model) == []


def test_fp16_wants_a_scaled_loss(model_store: str) -> None:
    model, batch = build("gpt2-zoo"), BATCHES[0]
    with start(model, config_of(model_store, "torch-fp16") | {"fp16": {"enabled": True}}) as engine:
        loss = engine(input_ids=batch, labels=batch).loss
        with pytest.raises(RuntimeError, match=r"engine\.scale\(loss\)\.backward\(\)"):
            loss.backward()
        loss = engine(input_ids=batch, labels=batch).loss
        engine.scale(loss).backward()
        engine.optimizer.step()
        # A scaled loss that the user does not use counts for the pass at hand only.
        loss = engine(input_ids=batch, labels=batch).loss
        engine.scale(loss)
        engine.backward(loss)
        engine.step()
        loss = engine(input_ids=batch, labels=batch).loss
        with pytest.raises(RuntimeError, match="Loss scaling is required"):
            loss.backward()
        with pytest.raises(ValueError, match="pass a scalar"):
            engine.scale(torch.ones(2))


PLANS = {
    "accumulation": {"accumulation": 4},
    "boundary": {"accumulation": 2, "schedule_of_reduction": "boundary"},
    "no_sync": {"accumulation": 2, "schedule_of_reduction": "no_sync"},
    "clipping": {"clipping": 0.5},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "poisoned_step": 1},
    "reentrant": {"checkpointing": "reentrant"},
    "non-reentrant": {"checkpointing": "non-reentrant"},
    "conditional": {"model": "conditional"},
}


def test_on_two_ranks_both_loops_give_the_same_bits(model_store: str, tmp_path: Path) -> None:
    def plan(name: str, loop: Any) -> Run:
        config = config_of(model_store, f"torch-ranks-{name}-{loop}")
        return Run(steps=4, loop=loop, config=config, **PLANS[name])  # type: ignore[arg-type]

    results = launch([plan(name, loop) for name in PLANS for loop in ("deepspeed", "torch")], 2, tmp_path)

    for ours, theirs in zip(results[::2], results[1::2], strict=True):
        assert_bit_equal(theirs, ours)
    assert results[2 * list(PLANS).index("fp16")].skipped == 1


def test_the_engine_is_a_module_by_behaviour(model_store: str, tmp_path: Path) -> None:
    model = build("gpt2-zoo")
    batch = BATCHES[0]
    names = [f"module.{name}" for name, _ in model.named_parameters()]
    seen = []
    with start(model, config_of(model_store, "module") | {"bf16": {"enabled": True}}) as engine:
        assert isinstance(engine, nn.Module)
        assert [name for name, _ in engine.named_parameters()] == names
        assert engine.generation_config is model.generation_config
        assert not hasattr(engine, "no_such_attribute")
        engine.register_forward_hook(lambda *_: seen.append("hook"))
        assert engine.eval() is engine
        assert not model.training
        with torch.no_grad():
            engine(input_ids=batch)
        assert seen == ["hook"]
        generated = engine.generate(batch[:, :5], max_new_tokens=4, do_sample=False)
        assert generated.shape == (batch.shape[0], 9)
        assert engine.to(torch.bfloat16) is engine.to("cpu") is engine
        for convert in (engine.float, engine.half, lambda: engine.to("meta")):
            with pytest.raises(RuntimeError, match="remove the call"):
                convert()
        assert (engine.zero_optimization_stage(), engine.bfloat16_enabled(), engine.fp16_enabled()) == (3, True, False)
        assert engine.get_batch_info() == (2, 2, 1)
        assert (engine.global_rank, engine.world_size, engine.was_step_applied()) == (0, 1, False)

        engine.train()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        assert (engine.was_step_applied(), engine.global_samples) == (True, 2)
        assert engine.save_16bit_model(tmp_path / "saved")
        with torch.no_grad():
            logits = engine.eval()(input_ids=batch).logits

    saved = torch.load(tmp_path / "saved/pytorch_model.bin", weights_only=True)
    plain = build("gpt2-zoo").bfloat16().eval()
    plain.load_state_dict(saved)
    assert torch.equal(plain(input_ids=batch).logits, logits)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["pytorch_model.bin"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_is_loaded_between_two_steps(model_store: str, stage: int) -> None:
    torch.manual_seed(9)
    other, model, batch = ZOO["gpt2-zoo"](), build("gpt2-zoo"), BATCHES[0]
    weights = other.state_dict()
    config = config_of(model_store, f"loaded-{stage}")
    if stage == 1:
        config["zero_optimization"] = {"stage": 1}
    with start(model, config) as engine:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        with pytest.raises(RuntimeError, match=r"call engine\.load_state_dict\(\)"):
            model.load_state_dict(weights)
        with pytest.raises(RuntimeError, match="unexpected are stranger"):
            engine.load_state_dict(weights | {"stranger": torch.ones(1)})
        with pytest.raises(ConfigError, match=r"of shape \[3\]"):
            engine.load_state_dict(weights | {"transformer.ln_f.weight": torch.ones(3)})
        assert engine.load_state_dict({f"module.{name}": value for name, value in weights.items()}) == ([], [])
        assert engine.load_state_dict({"stranger": torch.ones(1)}, strict=False).unexpected_keys == ["stranger"]
        with torch.no_grad():
            logits = engine.eval()(input_ids=batch).logits
        found = engine.full_state_dict()
    assert torch.equal(other.eval()(input_ids=batch).logits, logits)
    assert [name for name, value in weights.items() if not torch.equal(value, found[name])] == []


def small(address: str, job: str, stage: int) -> tuple[Any, dict[str, Any]]:
    """Return a small model, and a config for it in which the stage keeps its parameters whole, or does not."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, config_of(address, f"{job}-{stage}") | {"zero_optimization": {"stage": stage}}


def loss_of_step(engine: Engine) -> float:
    loss: torch.Tensor = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_conversion_of_the_model_or_of_a_part_is_refused_as_that_of_the_engine(model_store: str, stage: int) -> None:
    model, config = small(model_store, "converted", stage)
    with start(model, config) as engine:
        for convert in (model.half, model[0].double, lambda: model.to("meta")):
            with pytest.raises(RuntimeError, match="remove the call, or convert a copy"):
                convert()
        assert model.to("cpu") is model and model[0].float() is model[0]
        assert len({loss_of_step(engine) for _ in range(3)}) == 3
    if stage == 1:
        # The parameters are the script's after the end.
        assert model.half()[0].weight.dtype == torch.float16


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_are_loaded_into_a_part_only_where_they_reach_the_store(model_store: str, stage: int) -> None:
    model, config = small(model_store, "part", stage)
    first = model[0]
    weights = {"weight": torch.full((4, 4), 0.5)}
    with start(model, config) as engine:
        with pytest.raises(RuntimeError, match=r"call engine\.load_state_dict\(\)"):
            first.load_state_dict(weights, strict=False)
        with engine.gathered([first.weight], modifier_rank=0):
            with pytest.raises(RuntimeError, match=r"assign=True"):
                first.load_state_dict(weights, strict=False, assign=True)
            with pytest.raises(RuntimeError, match=r"of all parameters that are loaded"):
                first.load_state_dict(weights | {"bias": torch.zeros(4)})
            first.load_state_dict(weights, strict=False)
        assert torch.equal(engine.full_state_dict()["0.weight"], weights["weight"])
    if stage == 1:
        first.load_state_dict({"weight": torch.zeros(4, 4)}, strict=False)
        assert not first.weight.any()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_forward_that_trains_is_refused_where_it_would_train_another_kind_of_tensor(
    model_store: str, stage: int
) -> None:
    model, config = small(model_store, "replaced", stage)
    with start(model, config) as engine:
        former = model[2].weight.data
        model[2].weight.data = torch.zeros(1, 4, dtype=torch.float64)
        for forward in (engine, model):
            with pytest.raises(ConfigError, match=r"parameter 2\.weight has become a tensor of .* `\.data`"):
                forward(torch.ones(2, 4))
        model[2].weight.data = former
        assert len({loss_of_step(engine) for _ in range(3)}) == 3


@pytest.mark.parametrize("stage", [1, 3])
def test_a_copy_of_the_model_has_nothing_to_do_with_the_engine(model_store: str, stage: int) -> None:
    """Scripts keep averages of the weights in a copy."""
    model, config = small(model_store, "copied", stage)
    reference, inputs = small(model_store, "", stage)[0], torch.ones(2, 4)
    with start(model, config) as engine:
        if stage == 3:
            with pytest.raises(ReleasedParameterError, match=r"engine\.gathered"):
                deepcopy(model)
        with engine.gathered(model):
            average = deepcopy(model)
        losses = [loss_of_step(engine)]
        loss = engine(inputs).square().mean()
        # The copy computes with its own weights, also in the middle of a step, and is trained by its own optimizer.
        assert torch.equal(average(inputs), reference(inputs))
        average(inputs).sum().backward()
        torch.optim.SGD(average.parameters(), lr=1.0).step()
        assert not torch.equal(average[2].bias, reference[2].bias)
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), loss_of_step(engine)]
        newest = engine.full_state_dict()
        for name, value in average.state_dict().items():
            value.copy_(newest[name])
        assert [name for name, value in average.named_parameters() if not torch.equal(value, newest[name])] == []
        average.load_state_dict(reference.state_dict())
        assert average.double()[0].weight.dtype == torch.float64
    assert torch.equal(average(inputs.double()), reference.double()(inputs.double()))
    # The losses are those of a run without a copy.
    model, config = small(model_store, "alone", stage)
    with start(model, config) as engine:
        assert [loss_of_step(engine) for _ in range(3)] == losses


class Counted(nn.Linear):
    """A layer that keeps something beside tensors, as the layers of quantising libraries do."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("stage", [1, 3])
def test_extra_states_of_modules_are_in_the_state_of_the_model(model_store: str, tmp_path: Path, stage: int) -> None:
    _, config = small(model_store, "extra", stage)
    model: Any = nn.Sequential(Counted(4, 4), Counted(4, 1))
    plain: Any = nn.Sequential(Counted(4, 4), Counted(4, 1))
    with start(model, config) as engine:
        loss_of_step(engine)
        weights = engine.full_state_dict()
        engine.save_16bit_model(tmp_path)
        assert engine.load_state_dict(weights | {"1._extra_state": {"calls": 7}}) == ([], [])
        assert [layer.calls for layer in model] == [1, 7]
    for saved in (weights, torch.load(tmp_path / "pytorch_model.bin", weights_only=True)):
        plain[0].calls = 0
        plain.load_state_dict(saved)
        assert plain[0].calls == 1 and torch.equal(plain[0].weight, weights["0.weight"])


class Opaque(Counted):
    """A layer whose extra state torch does not load with `weights_only=True`."""

    def get_extra_state(self) -> dict[str, Any]:
        return super().get_extra_state() | {"layer": object()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_with_the_extra_states_of_its_modules(
    model_store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int
) -> None:
    _, config = small(model_store, "extra-resumed", stage)
    with start(nn.Sequential(Counted(4, 4), Counted(4, 1)), config) as engine:
        loss_of_step(engine)
        loss_of_step(engine)
        engine.save_checkpoint(tmp_path)
        loss_of_step(engine)
    resumed: Any = nn.Sequential(Counted(4, 4), Opaque(4, 1))
    with start(resumed, config) as engine:
        assert [layer.calls for layer in resumed] == [3, 3]
        for module_only in (True, False):
            loss_of_step(engine)
            engine.load_checkpoint(tmp_path, load_module_only=module_only)
            assert [layer.calls for layer in resumed] == [2, 2]
        loss_of_step(engine)
    # The commits leave the opaque state out. The run says so once, and so does a later run that begins without it.
    assert caplog.text.count("commits do not have 1._extra_state") == 1
    again: Any = nn.Sequential(Counted(4, 4), Counted(4, 1))
    with start(again, config):
        assert [layer.calls for layer in again] == [3, 0]
    assert "Today's values count for: 1._extra_state, which the commit does not have." in caplog.text


class Metered(nn.Linear):
    """A layer with entries of its own in its state dict, as metrics have for states that are no buffers."""

    def __init__(self, inputs: int, outputs: int, *, loads: bool = True) -> None:
        super().__init__(inputs, outputs)
        self.seen = torch.zeros(2)
        self.notes: list[str] = []
        self._loads = loads

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.notes.append("called")
        return super().forward(input)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        found = super().state_dict(*args, prefix=prefix, **kwargs)
        found |= {f"{prefix}seen": self.seen, f"{prefix}notes": list(self.notes)}
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self._loads:
            self.seen = state_dict.pop(f"{prefix}seen", self.seen)
            self.notes = state_dict.pop(f"{prefix}notes", self.notes)
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("stage", [1, 3])
def test_entries_that_modules_put_into_their_state_dict_are_saved_and_loaded(
    model_store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int
) -> None:
    def build() -> Any:
        return nn.Sequential(Metered(4, 4), Metered(4, 1, loads=False))

    _, config = small(model_store, "own-entries", stage)
    model, plain = build(), build()
    with start(model, config) as engine:
        loss_of_step(engine)
        weights = engine.full_state_dict()
        engine.save_16bit_model(tmp_path)
        saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        for state in (weights, saved, consolidated):
            assert state is not None and state.keys() == plain.state_dict().keys()
            assert torch.equal(state["0.seen"], torch.ones(2)) and state["1.notes"] == ["called"]
            assert torch.equal(state["0.weight"], weights["0.weight"])
        # The tensors that were read do not change with the model.
        loss_of_step(engine)
        assert torch.equal(model[0].seen, torch.full((2,), 2.0)) and torch.equal(weights["0.seen"], torch.ones(2))
        # The first layer loads its entries, and the second one leaves them alone.
        assert engine.load_state_dict(plain.state_dict() | {"0.notes": ["a"], "1.notes": ["b"]}) == ([], [])
        assert caplog.text.count("load_state_dict() has left out 1.notes, 1.seen, which") == 1
        assert torch.equal(model[0].seen, torch.zeros(2)) and model[0].notes == ["a"]
        assert torch.equal(model[1].seen, torch.full((2,), 2.0)) and model[1].notes == ["called"] * 2
        assert torch.equal(engine.full_state_dict()["1.weight"], plain[1].weight)
        # They may be missing.
        assert engine.load_state_dict({name: value for name, value in weights.items() if "0.s" not in name}) == ([], [])
        assert torch.equal(engine.full_state_dict()["1.weight"], weights["1.weight"])
    again = build()
    again[1]._loads = True
    again.load_state_dict(weights)
    assert torch.equal(again[1].seen, torch.ones(2)) and again[0].notes == ["called"]


@pytest.mark.parametrize("strict", [True, False])
def test_files_have_no_entries_that_modules_put_into_their_state_dict(
    model_store: str, tmp_path: Path, strict: bool
) -> None:
    plain = nn.Sequential(Metered(4, 4))
    state = {name: value for name, value in plain.state_dict().items() if name != "0.notes"}
    save_file(state, tmp_path / "with.safetensors")
    save_file({name: value for name, value in state.items() if name != "0.seen"}, tmp_path / "model.safetensors")
    config = config_of(model_store, f"own-entries-{strict}")
    with start(nn.Sequential(Metered(4, 4)), config, weights=tmp_path, strict_weights=strict) as engine:
        assert torch.equal(engine.full_state_dict()["0.weight"], plain.state_dict()["0.weight"])
    config = config_of(model_store, f"own-entries-{strict}-with")
    arguments = {"weights": tmp_path / "with.safetensors", "strict_weights": strict}
    if strict:
        with pytest.raises(ConfigError, match=r"0\.seen is unexpected.*\n.*strict_weights=False"):
            start(nn.Sequential(Metered(4, 4)), config, **arguments)
        return
    with start(nn.Sequential(Metered(4, 4)), config, **arguments) as engine:
        assert torch.equal(engine.full_state_dict()["0.weight"], plain.state_dict()["0.weight"])


def test_a_model_whose_only_child_is_called_module_loads_its_own_names(model_store: str) -> None:
    """The names of its state begin as those of the engine's state do."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)

    values = {"module.weight": torch.ones(4, 4), "module.bias": torch.zeros(4)}
    with start(Wrapped(), config_of(model_store, "wrapped")) as engine:
        for loaded in (values, {f"module.{name}": value + 1 for name, value in values.items()}):
            assert engine.load_state_dict(loaded) == ([], [])
            found = engine.full_state_dict()
            assert all(torch.equal(found[name], value) for name, value in zip(found, loaded.values(), strict=True))
        assert engine.load_state_dict({"module.weight": torch.ones(4, 4)}, strict=False) == (["module.bias"], [])


def test_batch_sizes_are_changed_between_two_steps(model_store: str) -> None:
    model = build("gpt2-zoo")

    def step(engine: Engine, micro_batches: int) -> None:
        for number in range(micro_batches):
            batch = BATCHES[number % len(BATCHES)]
            assert engine.is_gradient_accumulation_boundary() == (number == micro_batches - 1)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()

    config = config_of(model_store, "batch-sizes")
    with start(model, config) as engine:
        step(engine, 1)
        engine.set_train_batch_size(6)
        step(engine, 3)
        step(engine, 3)
        engine.set_train_micro_batch_size(1)
        assert engine.get_batch_info() == (3, 1, 3)
        step(engine, 3)
        engine.set_train_batch_size(1)
        step(engine, 1)
        with pytest.raises(ValueError, match="write a multiple"):
            engine.set_train_batch_size(0)
        assert (engine.global_steps, engine.global_samples) == (5, 2 + 6 + 6 + 3 + 1)
    with start(build("gpt2-zoo"), config) as engine:
        assert (engine.global_steps, engine.global_samples) == (5, 18)
        step(engine, 1)


class Doubled(nn.Module):
    """A module around a model that counts its calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        doubled: torch.Tensor = 2 * self.model(values)
        return doubled


def test_an_engine_uses_the_model_optimizer_and_schedule_that_the_script_sets_on_it(model_store: str) -> None:
    """As scripts do with `engine.module = torch.compile(engine.module)`."""
    with start(nn.Linear(4, 1), config_of(model_store, "set on the engine")) as engine:
        plain = engine.module
        around = engine.module = Doubled(plain)
        assert engine(torch.ones(2, 4)).tolist() == around(torch.ones(2, 4)).tolist()
        assert around.calls == 2
        own = engine.optimizer
        engine.optimizer = cast(Any, SimpleNamespace(param_groups=[{"lr": 0.125}]))
        assert engine.get_lr() == [0.125]
        engine.optimizer = own
        engine.lr_scheduler = scheduler = mock.create_autospec(LRScheduler, instance=True)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        scheduler.step.assert_called_once_with()
        engine.global_steps = 5
        assert engine.global_steps == 5
        with mock.patch.object(engine, "zero_grad") as dropped:
            plain.zero_grad()
        dropped.assert_called_once_with(True)
