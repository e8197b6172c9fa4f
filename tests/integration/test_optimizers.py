"""Every optimizer, and every way to change its groups in mid-run, gives the bits of plain PyTorch.

Run as a program, it is one rank: `python -m tests.integration.test_optimizers ADDRESS RESULTS.pt`, with torchrun's
environment variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.equality import assert_equal
from tests.integration.support.ranks import run_ranks
from tests.optimizer_cases import PublishedLion
from trainer_client import Engine, Kind, Lion, StoreClientSync
from trainer_client.schedules import OneCycle

# The width and the numbers of elements are odd.
WIDTH = 21
STEPS = 5
CLIPPING = 0.5

Make = Callable[[Any], Optimizer]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    budgets = {"host_budget": "32MiB", "nvme_budget": "128MiB"}
    with Daemon(tmp_path_factory.mktemp("optimizers") / "state", budgets) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log, daemon.log


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator)


IN_THE_STORE = {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}}
ON_THE_DEVICE = {"stage": 2}


def start(address: str, job: str, model: nn.Module, optimizer: Any, **config: Any) -> Engine:
    section = config.pop("paramserver", {})
    return trainer_client.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=config.pop("lr_scheduler", None),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": CLIPPING,
            "zero_optimization": IN_THE_STORE,
            "paramserver": {"address": address, "job": job, **section},
            **config,
        },
    )[0]


def train(engine: Engine, inputs: torch.Tensor) -> tuple[float, float | None]:
    loss = engine.backward(engine(inputs))
    engine.step()
    return loss.item(), engine.get_global_grad_norm()


def train_plain(model: nn.Module, optimizer: Optimizer, inputs: torch.Tensor) -> tuple[float, float | None]:
    loss = model(inputs)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
    optimizer.step()
    model.zero_grad()
    return loss.item(), norm.item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An optimizer for the store. `reference` makes plain PyTorch's optimizer where that is another one."""

    make: Make
    reference: Make | None = None
    states: Sequence[Kind] = ()


MOMENTS: Sequence[Kind] = ("exp_avg", "exp_avg_sq")
CASES = {
    "AdamW": Case(make=lambda p: AdamW(p, lr=1e-2, weight_decay=0.1, fused=True), states=MOMENTS),
    "Adam": Case(make=lambda p: Adam(p, lr=1e-2, weight_decay=0.1, fused=True), states=MOMENTS),
    "SGD": Case(make=lambda p: SGD(p, lr=0.1, weight_decay=0.1, fused=True)),
    "SGD with momentum": Case(
        make=lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True),
        states=["momentum_buffer"],
    ),
    "SGD of Nesterov": Case(
        make=lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True), states=["momentum_buffer"]
    ),
    "Lion": Case(
        make=lambda p: Lion(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        reference=lambda p: PublishedLion(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        states=["exp_avg"],
    ),
    "Adagrad": Case(
        make=lambda p: Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1, fused=True), states=["sum"]
    ),
}


@pytest.mark.parametrize("home", [IN_THE_STORE, ON_THE_DEVICE], ids=["nvme", "device"])
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_gives_the_bits_of_plain_pytorch(store: Daemon, name: str, home: dict[str, Any]) -> None:
    job = f"{name} at stage {home['stage']}"
    case, plain, model = CASES[name], Net(), Net()
    reference = (case.reference or case.make)(plain.parameters())
    expected = [train_plain(plain, reference, inputs) for inputs in batches(STEPS)]

    with start(store.address, job, model, case.make(model.parameters()), zero_optimization=home) as engine:
        seen = [train(engine, inputs) for inputs in batches(STEPS)]
        weights = engine.full_state_dict()

    assert seen == expected
    assert_equal(weights, plain.state_dict())
    with StoreClientSync.connect(store.address) as client, client.read(job) as reader:
        for fqn, parameter in plain.named_parameters():
            for kind in case.states:
                assert torch.equal(reader.get(fqn, kind=kind), reference.state[parameter][kind]), f"{kind} of {fqn}"


@pytest.mark.parametrize("name", ["SGD of Nesterov", "Lion", "Adagrad"])
def test_bf16_has_fp32_masters_and_states(store: Daemon, name: str) -> None:
    case, plain, model = CASES[name], Net(), Net()
    masters = {fqn: p.detach().clone().requires_grad_() for fqn, p in plain.named_parameters()}
    reference = (case.reference or case.make)(masters.values())
    plain.to(torch.bfloat16)
    expected = []
    for inputs in batches(STEPS):
        loss = plain(inputs.bfloat16())
        loss.backward()
        for fqn, parameter in plain.named_parameters():
            assert parameter.grad is not None
            masters[fqn].grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(masters.values(), CLIPPING)
        reference.step()
        plain.zero_grad()
        plain.load_state_dict(masters)
        expected.append((loss.item(), norm.item()))

    with start(
        store.address, f"{name} in bf16", model, case.make(model.parameters()), bf16={"enabled": True}
    ) as engine:
        seen = [train(engine, inputs) for inputs in batches(STEPS)]
        weights = engine.full_state_dict()

    assert seen == expected
    assert_equal(weights, {fqn: master.detach() for fqn, master in masters.items()})


def freeze(modules: Iterable[nn.Module], *, frozen: bool) -> None:
    for module in modules:
        module.requires_grad_(not frozen)


class Changes:
    """The changes that a fine-tuning makes to its model and its parameter groups between two steps."""

    def __init__(self, model: Net, make: Make) -> None:
        self.model = model
        first, thawed, third = model.blocks
        thawed.requires_grad_(False)
        self.original = make(
            [
                {"params": [*first.parameters()]},
                {"params": []},
                {"params": [*third.parameters()], "lr": 5e-2},
            ]
        )  # The head is in no group.

    def before(self, step: int, optimizer: Optimizer) -> None:
        first, thawed, third = self.model.blocks
        match step:
            case 2:
                # The block's gradients count in the norm, but no group has the block yet, so it is not updated.
                freeze([thawed], frozen=False)
            case 3:
                optimizer.add_param_group({"params": [*thawed.parameters()], "lr": 2e-2})
                freeze([third], frozen=True)
            case 5:
                freeze([first, thawed], frozen=True)
                optimizer.param_groups[1]["lr"] = 1.0  # The second group is empty.
            case 6:
                freeze([first, thawed, third], frozen=False)
                self.original.add_param_group({"params": [*self.model.head.parameters()], "lr": 1e-2})


Trained = tuple[list[tuple[float, float | None]], dict[str, torch.Tensor]]

CHANGES_STEPS = 9
MAY_THAW = {"may_thaw": ["blocks.1.*"]}


def changed_through_store(
    address: str, job: str, make: Make, data: Iterable[torch.Tensor], home: Any = IN_THE_STORE
) -> Trained:
    model = Net()
    changes = Changes(model, make)
    seen = []
    config = {"paramserver": MAY_THAW, "zero_optimization": home}
    with start(address, job, model, changes.original, **config) as engine:
        for step, inputs in enumerate(data, start=1):
            changes.before(step, engine.optimizer)
            seen.append(train(engine, inputs))
        return seen, engine.full_state_dict()


def changed_plainly(make: Make) -> Trained:
    plain = Net()
    changes = Changes(plain, make)
    expected = []
    for step, inputs in enumerate(batches(CHANGES_STEPS), start=1):
        changes.before(step, changes.original)
        expected.append(train_plain(plain, changes.original, inputs))
    return expected, plain.state_dict()


@pytest.mark.parametrize(
    ("name", "home"),
    [("AdamW", IN_THE_STORE), ("SGD with momentum", IN_THE_STORE), ("Adagrad", IN_THE_STORE), ("AdamW", ON_THE_DEVICE)],
)
def test_groups_that_come_later_and_what_is_frozen_and_thawed(store: Daemon, name: str, home: dict[str, Any]) -> None:
    job = f"{name} changing at stage {home['stage']}"
    make = CASES[name].make
    expected, weights_expected = changed_plainly(make)

    seen, weights = changed_through_store(store.address, job, make, batches(CHANGES_STEPS), home)

    assert seen == expected
    assert_equal(weights, weights_expected)


def test_two_ranks_change_groups_as_one_process_does_to_rounding(store: Daemon, tmp_path: Path) -> None:
    results = tmp_path / "results.pt"
    run_ranks("tests.integration.test_optimizers", 2, store.address, results)

    for name, (seen, weights) in torch.load(results).items():
        expected, weights_expected = changed_plainly(CASES[name].make)
        torch.testing.assert_close([norm for _, norm in seen], [norm for _, norm in expected], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights, dict(weights_expected), rtol=1e-4, atol=1e-4)


def test_a_resumed_run_has_the_groups_that_were_added(store: Daemon) -> None:
    make = CASES["AdamW"].make
    expected, weights_expected = changed_plainly(make)
    seen = []
    for first, last in ((1, 4), (5, 7), (8, CHANGES_STEPS)):
        model = Net()
        changes = Changes(model, make)
        # The user's program freezes and thaws the modules again. The optimizer's groups come from the store.
        for step in range(1, first):
            match step:
                case 2:
                    freeze([model.blocks[1]], frozen=False)
                case 3:
                    freeze([model.blocks[2]], frozen=True)
                case 6:
                    freeze(model.blocks, frozen=False)
        with start(store.address, "resumed groups", model, changes.original, paramserver=MAY_THAW) as engine:
            assert engine.resumed_step == first - 1
            for step, inputs in enumerate(batches(last), start=1):
                if step >= first:
                    changes.before(step, engine.optimizer)
                    seen.append(train(engine, inputs))
            weights = engine.full_state_dict()

    assert seen == expected
    assert_equal(weights, weights_expected)


def test_what_had_no_states_gets_them_on_a_resume_that_names_it(store: Daemon) -> None:
    make = CASES["SGD with momentum"].make

    def beginning(model: Net) -> Optimizer:
        model.blocks[1].requires_grad_(False)
        return make([p for p in model.parameters() if p.requires_grad])

    def thaw(model: Net, optimizer: Optimizer) -> None:
        model.blocks[1].requires_grad_(True)
        optimizer.add_param_group({"params": [*model.blocks[1].parameters()], "lr": 0.05})

    plain = Net()
    reference = beginning(plain)
    expected = []
    for step, inputs in enumerate(batches(6), start=1):
        if step == 4:
            thaw(plain, reference)
        expected.append(train_plain(plain, reference, inputs))

    seen = []
    for steps, section in ((range(1, 4), {}), (range(4, 7), MAY_THAW)):
        model = Net()
        optimizer = beginning(model)
        with start(store.address, "thawed on resume", model, optimizer, paramserver=section) as engine:
            if steps.start == 4:
                thaw(model, engine.optimizer)
            seen += [train(engine, inputs) for step, inputs in enumerate(batches(6), start=1) if step in steps]
            weights = engine.full_state_dict()

    assert seen == expected
    assert_equal(weights, plain.state_dict())


def test_a_schedule_goes_on_with_its_rates_where_a_resume_names_more_that_may_thaw(store: Daemon) -> None:
    """The parameter groups have the settings of the new run then, but the rates are those of the schedule."""
    make = CASES["SGD with momentum"].make

    def beginning(model: Net) -> tuple[Optimizer, LRScheduler]:
        model.blocks[1].requires_grad_(False)
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        return optimizer, StepLR(optimizer, step_size=1, gamma=0.5)

    plain = Net()
    reference, plain_schedule = beginning(plain)
    expected = []
    for inputs in batches(4):
        expected.append(train_plain(plain, reference, inputs))
        plain_schedule.step()

    seen = []
    for steps, section in ((range(2), {}), (range(2, 4), MAY_THAW)):
        model = Net()
        optimizer, schedule = beginning(model)
        job = "schedule with more that may thaw"
        with start(store.address, job, model, optimizer, lr_scheduler=schedule, paramserver=section) as engine:
            assert engine.get_lr() == [0.1 * 0.5**steps.start]
            seen += [train(engine, inputs) for step, inputs in enumerate(batches(4)) if step in steps]
            weights = engine.full_state_dict()

    assert seen == expected
    assert_equal(weights, plain.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "SGD of Nesterov"])
def test_a_schedule_that_cycles_the_momentum_reaches_the_store(store: Daemon, name: str) -> None:
    def schedule(optimizer: Optimizer) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * STEPS, base_momentum=0.5)

    make, plain, model = CASES[name].make, Net(), Net()
    reference = make(plain.parameters())
    plain_schedule = schedule(reference)
    expected = []
    for inputs in batches(2 * STEPS - 1):
        expected.append(train_plain(plain, reference, inputs))
        plain_schedule.step()

    optimizer = make(model.parameters())
    with start(store.address, f"{name} cycling", model, optimizer, lr_scheduler=schedule) as engine:
        seen = [train(engine, inputs) for inputs in batches(2 * STEPS - 1)]
        weights = engine.full_state_dict()
        assert engine.get_lr() == plain_schedule.get_last_lr()
        assert engine.get_mom() == [reference.param_groups[0]["betas" if name == "AdamW" else "momentum"]]

    assert seen == expected
    assert_equal(weights, plain.state_dict())


CYCLE: dict[str, Any] = {
    "cycle_min_lr": 1e-3,
    "cycle_max_lr": 0.1,
    "cycle_first_step_size": 3,
    "decay_step_size": 2,
    "decay_lr_rate": 1,
}


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_a_schedule_of_the_config_reaches_the_store(store: Daemon, name: str) -> None:
    make, plain, model = CASES[name].make, Net(), Net()
    reference = make(plain.parameters())
    plain_schedule = OneCycle(reference, **CYCLE)
    expected = []
    for inputs in batches(2 * STEPS - 1):
        expected.append(train_plain(plain, reference, inputs))
        plain_schedule.step()

    section = {"type": "OneCycle", "params": CYCLE}
    with start(store.address, f"{name} of OneCycle", model, make(model.parameters()), scheduler=section) as engine:
        seen = [train(engine, inputs) for inputs in batches(2 * STEPS - 1)]
        weights = engine.full_state_dict()
        assert engine.get_lr() == plain_schedule.get_last_lr()
        assert engine.get_mom() == plain_schedule.get_mom()

    assert seen == expected
    assert_equal(weights, plain.state_dict())


def test_a_scheduler_that_is_passed_comes_before_that_of_the_config(
    store: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    section = {"type": "OneCycle", "params": CYCLE}
    with (
        caplog.at_level("INFO", logger="trainer_client"),
        start(
            store.address,
            "two schedulers",
            model,
            SGD(model.parameters(), lr=0.5, momentum=0.25),
            lr_scheduler=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
            scheduler=section,
        ) as engine,
    ):
        assert type(engine.lr_scheduler) is StepLR
        train(engine, next(batches(1)))
        assert (engine.get_lr(), engine.get_mom()) == ([0.25], [0.25])

    assert "using client callable to create LR scheduler; the config's scheduler OneCycle has no effect" in caplog.text


def test_what_has_no_states_is_refused_before_a_step_is_begun(store: Daemon) -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    with start(store.address, "refused", model, AdamW(trained)) as engine:
        first, second = batches(2)
        train(engine, first)
        model.blocks[1].norm.weight.requires_grad_(True)
        engine.backward(engine(second))
        with pytest.raises(trainer_client.ConfigError, match=r"blocks\.1\.norm\.weight cannot be trained.*may_thaw"):
            engine.step()
        model.blocks[1].norm.weight.requires_grad_(False)
        engine.step()
        assert engine.global_steps == 2


def main() -> None:
    address, results = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = [inputs[2 * rank : 2 * rank + 2] for inputs in batches(CHANGES_STEPS)]
    trained = {
        name: changed_through_store(address, f"{name} on 2 ranks", CASES[name].make, data)
        for name in ("AdamW", "SGD with momentum", "Adagrad")
    }
    if rank == 0:
        torch.save(trained, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
