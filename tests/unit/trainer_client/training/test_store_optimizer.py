"""StoreOptimizer takes over torch's optimizer with its groups and schedulers, and refuses what the store cannot do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, RMSprop, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client import Lion
from trainer_client.config.loading import load_config
from trainer_client.config.precision import Fp16Section
from trainer_client.errors import ConfigError
from trainer_client.optimizers.hyper_parameters import HyperParameterTable
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.run.client_state import decode, encode
from trainer_client.training.step.precision import LossScaler
from trainer_client.training.store_optimizer import StoreOptimizer, make_optimizer


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def taken_over(net: nn.Module, groups: Any, **options: Any) -> tuple[AdamW, StoreOptimizer]:
    original = AdamW(groups, **options)
    return original, StoreOptimizer(original, list_parameters(net))


def row(optimizer: StoreOptimizer, parameter: int, update_count: int = 1) -> Any:
    """Return the optimizer's message for a parameter, given by its index in the model."""
    made = optimizer.row(optimizer.groups_of_parameters()[parameter], update_count)
    return getattr(made, made.WhichOneof("optimizer") or "")


def test_hyper_parameters_are_those_of_the_parameters_group() -> None:
    net = model()
    groups = [
        {"params": list(net[0].parameters()), "lr": 0.5, "weight_decay": 0.0},
        {"params": []},
        {"params": list(net[1].parameters())},
    ]
    _, optimizer = taken_over(net, groups, lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.125)

    first, last = row(optimizer, 0), row(optimizer, 3, 7)

    assert isinstance(first, pb.AdamW)
    assert (first.lr, first.weight_decay, first.update_count) == (0.5, 0.0, 1)
    assert (last.lr, last.weight_decay, last.beta1, last.beta2, last.eps) == (0.25, 0.125, 0.5, 0.75, 1e-3)
    assert last.update_count == 7


@pytest.mark.parametrize(
    ("original", "expected", "kinds"),
    [
        (
            lambda p: Adam(p, lr=0.5, weight_decay=0.25),
            pb.Adam(lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.25, update_count=2),
            (pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ),
        ),
        (
            lambda p: Adam(p, lr=torch.tensor(0.5), eps=0.125, decoupled_weight_decay=True),
            pb.AdamW(lr=0.5, beta1=0.9, beta2=0.999, eps=0.125, update_count=2),
            (pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ),
        ),
        (lambda p: SGD(p, lr=0.5, weight_decay=0.25), pb.Sgd(lr=0.5, weight_decay=0.25, update_count=2), ()),
        (
            lambda p: SGD(p, lr=0.5, momentum=0.75, dampening=0.25),
            pb.Sgd(lr=0.5, momentum=0.75, dampening=0.25, update_count=2),
            (pb.KIND_MOMENTUM_BUFFER,),
        ),
        (
            lambda p: SGD(p, lr=0.5, momentum=0.75, nesterov=True),
            pb.Sgd(lr=0.5, momentum=0.75, nesterov=True, update_count=2),
            (pb.KIND_MOMENTUM_BUFFER,),
        ),
        (
            lambda p: Lion(p, lr=0.5, betas=(0.25, 0.75), weight_decay=0.125),
            pb.Lion(lr=0.5, beta1=0.25, beta2=0.75, weight_decay=0.125),
            (pb.KIND_EXP_AVG,),
        ),
        (
            lambda p: Adagrad(p, lr=0.5, lr_decay=0.25, eps=0.125, initial_accumulator_value=2.0),
            pb.Adagrad(lr=0.5, lr_decay=0.25, eps=0.125, initial_accumulator_value=2.0, update_count=2),
            (pb.KIND_SUM,),
        ),
    ],
    ids=["adam", "adam as adamw", "sgd", "momentum", "nesterov", "lion", "adagrad"],
)
def test_every_optimizer_that_the_store_runs_is_taken_over(original: Any, expected: Any, kinds: Any) -> None:
    net = model()
    given = original(net.parameters())

    optimizer = StoreOptimizer(given, list_parameters(net))

    assert row(optimizer, 0, 2) == expected
    assert optimizer.state_kinds == kinds
    assert not given.state, "what torch's Adagrad allocates is the store's to keep"


@pytest.mark.parametrize("made_for", ["original", "ours"])
def test_a_scheduler_drives_it_without_warnings(made_for: str) -> None:
    net = model()
    original, optimizer = taken_over(net, net.parameters(), lr=1.0)
    scheduler = LambdaLR(original if made_for == "original" else optimizer, lambda step: 0.5**step)

    for _ in range(2):
        optimizer.make_step(lambda: None)
        scheduler.step()

    assert row(optimizer, 0).lr == 0.25


def schedules(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    return [OneCycleLR(optimizer, max_lr=0.5, total_steps=10), CosineAnnealingLR(optimizer, T_max=10)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("momentum_of_sgd", [True, False])
def test_schedules_of_torch_reach_the_rows_as_they_reach_torch(which: int, momentum_of_sgd: bool) -> None:
    def made(net: nn.Module) -> torch.optim.Optimizer:
        return SGD(net.parameters(), lr=0.1, momentum=0.9) if momentum_of_sgd else Adam(net.parameters(), lr=0.1)

    plain_net, net = model(), model()
    plain, original = made(plain_net), made(net)
    optimizer = StoreOptimizer(original, list_parameters(net))
    plain_schedule, schedule = schedules(plain)[which], schedules(optimizer)[which]
    seen, expected = [], []
    for _ in range(8):
        message, group = row(optimizer, 0), plain.param_groups[0]
        seen.append((message.lr, message.momentum if momentum_of_sgd else message.beta1))
        expected.append((group["lr"], group["momentum"] if momentum_of_sgd else group["betas"][0]))
        optimizer.make_step(lambda: None)
        plain.step()
        schedule.step()
        plain_schedule.step()

    assert seen == expected
    assert len(set(seen)) == 8
    assert (len({momentum for _, momentum in seen}) > 1) == (which == 0)


def test_a_schedule_that_follows_a_metric_can_be_driven_by_hand() -> None:
    net = model()
    original, optimizer = taken_over(net, net.parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(original, factor=0.5, patience=0)
    for metric in (1.0, 2.0):
        scheduler.step(metric)

    assert row(optimizer, 0).lr == 0.5


class Loop:
    """An engine that notes its calls, and makes a step as an engine does."""

    def __init__(self, optimizer: StoreOptimizer) -> None:
        self.calls: list[str] = []
        self.loss_scaler = LossScaler(Fp16Section())
        self._optimizer = optimizer

    def was_step_skipped(self) -> bool:
        return False

    def step(self) -> None:
        self._optimizer.make_step(lambda: self.calls.append("step"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls.append("zero_grad")


def test_a_loop_that_steps_the_optimizer_steps_the_engine_and_runs_hooks_once() -> None:
    net = model()
    original, optimizer = taken_over(net, net.parameters())
    loop = Loop(optimizer)
    optimizer.drive(loop)
    hooked: list[str] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append("ours"))
    original.register_step_post_hook(lambda *_: hooked.append("original"))

    optimizer.step()
    optimizer.zero_grad()
    loop.step()

    assert loop.calls == ["step", "zero_grad", "step"]
    assert hooked == ["original", "ours"] * 2


def test_direct_use_is_refused_with_what_to_call() -> None:
    net = model()
    _, optimizer = taken_over(net, net.parameters())

    with pytest.raises(RuntimeError, match="has no engine"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="has no engine"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="call the closure yourself"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match=r"remove load_state_dict\(\)"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_state_dict_without_states_says_so(caplog: pytest.LogCaptureFixture) -> None:
    net = model()

    for optimizer in taken_over(net, net.parameters(), lr=0.5):
        caplog.clear()
        found = optimizer.state_dict()

        assert found["state"] == {} and [group["lr"] for group in found["param_groups"]] == [0.5]
        (record,) = caplog.records
        assert record.levelname == "WARNING" and "engine.save_checkpoint()" in record.message


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_flags_that_change_the_arithmetic_are_refused(flag: str) -> None:
    net = model()

    with pytest.raises(ConfigError, match=f"{flag}=True of parameter group 0"):
        taken_over(net, net.parameters(), **{flag: True})


class OwnAdamW(AdamW):
    """A subclass, which the store refuses because it cannot know what the subclass changes."""


@pytest.mark.parametrize(
    ("original", "reason"),
    [
        (LBFGS, "LBFGS is not elementwise: it needs whole parameters"),
        (Adafactor, "Adafactor is not elementwise"),
        (lambda p: Muon([q for q in p if q.ndim == 2]), "Muon is not elementwise"),
        (lambda p: SparseAdam(list(p)), "SparseAdam is not elementwise"),
        (RMSprop, "RMSprop is none of the optimizers that the store runs; use AdamW"),
        (OwnAdamW, "OwnAdamW is none of"),
        (lambda p: SGD(p, dampening=0.5), "group 0 has dampening 0.5 and no momentum"),
    ],
)
def test_what_the_store_does_not_run_is_refused_with_the_reason(original: Any, reason: str) -> None:
    net = model()

    with pytest.raises(ConfigError, match=reason):
        StoreOptimizer(original(net.parameters()), list_parameters(net))


@pytest.mark.parametrize("original", [AdamW, Adagrad, Lion, lambda p: SGD(p, momentum=0.9)])
def test_an_optimizer_with_states_is_refused(original: Any) -> None:
    net = model()
    used = original(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    used.step()

    with pytest.raises(ConfigError, match="steps already"):
        StoreOptimizer(used, list_parameters(net))


def test_states_are_kept_of_what_is_trained_grouped_or_named(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    for frozen in (net[1], net[2], net[3]):
        frozen.requires_grad_(False)
    parameters = list_parameters(net)

    with caplog.at_level(logging.WARNING):
        optimizer = StoreOptimizer(AdamW([parameters[0].tensor, parameters[2].tensor]), parameters, ["2.*"])

    assert [p.fqn for p in parameters if optimizer.has_states(p)] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "2.weight",
        "2.bias",
    ]
    assert optimizer.groups_of_parameters() == {0: 0, 2: 0}
    (warned,) = caplog.messages
    assert "never updated: 0.bias" in warned


def test_a_pattern_that_names_nothing_is_refused() -> None:
    net = model()

    with pytest.raises(ConfigError, match=r"may_thaw has '7\.\*', which names no parameter"):
        StoreOptimizer(AdamW(net.parameters()), list_parameters(net), ["1.*", "7.*"])


def test_a_foreign_parameter_is_refused() -> None:
    net = model()

    with pytest.raises(ConfigError, match="not the model's"):
        taken_over(net, [*net.parameters(), nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("added_to", ["ours", "original"])
def test_a_group_that_is_added_later_counts_from_then_on(added_to: str) -> None:
    net = model()
    original, optimizer = taken_over(net, net[0].parameters(), lr=0.5)
    counts = [3, 3, 1, 1]
    assert HyperParameterTable(optimizer.groups_of_parameters(), optimizer.row, counts).row_of(2) == -1

    (optimizer if added_to == "ours" else original).add_param_group({"params": net[1].parameters(), "lr": 0.25})

    optimizer.check_groups()
    table = HyperParameterTable(optimizer.groups_of_parameters(), optimizer.row, counts)
    assert [table.row_of(parameter) for parameter in (0, 2, 1, 3)] == [0, 1, 0, 1]
    assert [(made.adamw.lr, made.adamw.update_count) for made in table.rows] == [(0.5, 3), (0.25, 1)]
    assert original.param_groups is optimizer.param_groups


def test_what_has_no_states_can_neither_be_grouped_nor_thawed() -> None:
    net = model()
    net[1].requires_grad_(False)
    original, optimizer = taken_over(net, net[0].parameters())

    with pytest.raises(ConfigError, match=r"1\.bias cannot be trained.*may_thaw"):
        optimizer.add_param_group({"params": [net[1].bias]})
    assert len(optimizer.param_groups) == 1
    optimizer.check_groups()
    net[1].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1\.weight cannot be trained.*may_thaw"):
        optimizer.check_groups()
    net[1].weight.requires_grad_(False)
    original.add_param_group({"params": [net[1].bias]})
    with pytest.raises(ConfigError, match=r"1\.bias cannot be trained"):
        optimizer.check_groups()


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("lr", -0.5, r"group 1 of the optimizer: adamw\.lr = -0\.5 is out of its range"),
        ("lr", float("nan"), r"adamw\.lr = nan"),
        ("betas", (0.9, 1.0), r"adamw\.beta2 = 1\.0"),
        ("amsgrad", True, "amsgrad=True of parameter group 1"),
    ],
)
def test_a_step_is_not_begun_with_settings_that_make_no_sense(key: str, value: Any, named: str) -> None:
    net = model()
    _, optimizer = taken_over(net, [{"params": net[0].parameters()}, {"params": net[1].parameters()}])
    optimizer.param_groups[1][key] = value  # Schedulers write here too.

    with pytest.raises(ConfigError, match=named):
        optimizer.check_groups()


def test_a_momentum_that_the_job_has_no_state_for_is_refused() -> None:
    net = model()
    optimizer = StoreOptimizer(SGD(net.parameters(), lr=0.5), list_parameters(net))
    optimizer.param_groups[0]["momentum"] = 0.5  # A scheduler that is made before the job is opened does the same.
    assert optimizer.state_kinds == (pb.KIND_MOMENTUM_BUFFER,)

    other = StoreOptimizer(SGD(net.parameters(), lr=0.5), list_parameters(net))
    assert other.state_kinds == ()
    other.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ConfigError, match="group 0 needs momentum_buffer now"):
        other.check_groups()


def configured(net: nn.Module, kind: str, **params: Any) -> StoreOptimizer:
    raw = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    section = {"type": kind, "params": params}
    config = load_config({"train_batch_size": 1, "zero_optimization": raw, "optimizer": section}, {})
    return make_optimizer(None, config.optimizer, None, list_parameters(net))


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        (
            "AdamW",
            {"lr": 0.5, "betas": [0.8, 0.9], "torch_adam": True},
            pb.AdamW(lr=0.5, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.01, update_count=1),
        ),
        (
            "Adam",  # In DeepSpeed, "Adam" means AdamW.
            {"lr": 0.5, "weight_decay": 0.1},
            pb.AdamW(lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, update_count=1),
        ),
        (
            "Adam",
            {"lr": 0.5, "weight_decay": 0.1, "adam_w_mode": False},
            pb.Adam(lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, update_count=1),
        ),
        (
            "SGD",
            {"lr": 0.5, "momentum": 0.9, "nesterov": True},
            pb.Sgd(lr=0.5, momentum=0.9, nesterov=True, update_count=1),
        ),
        ("Lion", {"lr": 0.5, "betas": [0.9, 0.99]}, pb.Lion(lr=0.5, beta1=0.9, beta2=0.99)),
        ("Adagrad", {"lr_decay": 0.5}, pb.Adagrad(lr=0.01, lr_decay=0.5, eps=1e-10, update_count=1)),
    ],
)
def test_the_config_makes_what_deepspeed_means(kind: str, params: dict[str, Any], expected: Any) -> None:
    assert row(configured(model(), kind, **params), 0) == expected


def test_what_torch_refuses_is_refused_in_the_configs_words() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params is refused by SGD: Nesterov"):
        configured(model(), "SGD", nesterov=True)


def test_a_callable_goes_before_the_config_and_no_optimizer_at_all_is_refused() -> None:
    net = model()
    called = make_optimizer(lambda params: AdamW(params, lr=0.25), None, None, list_parameters(net))

    assert row(called, 0).lr == 0.25
    with pytest.raises(ConfigError, match="AdamW"):
        make_optimizer(None, None, None, list_parameters(net))


def test_an_optimizer_keeps_its_groups_when_model_parameters_are_passed_beside_it() -> None:
    """Scripts for DeepSpeed pass both; the groups are the optimizer's."""
    net = model()
    own = AdamW([{"params": [next(net.parameters())], "lr": 0.5}])

    optimizer = make_optimizer(own, None, net.parameters(), list_parameters(net))

    assert [len(group["params"]) for group in optimizer.param_groups] == [1] and row(optimizer, 0).lr == 0.5


def test_a_model_without_trainable_parameters_can_be_thawed_later() -> None:
    net = model().requires_grad_(False)
    config = load_config(
        {
            "train_batch_size": 1,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
            "optimizer": {"type": "SGD"},
        },
        {},
    )
    optimizer = make_optimizer(None, config.optimizer, None, list_parameters(net), ["0.*"])

    net[0].requires_grad_(True)
    optimizer.add_param_group({"params": net[0].parameters()})

    optimizer.check_groups()
    assert optimizer.groups_of_parameters() == {0: 1, 1: 1}


def carried(optimizer: StoreOptimizer) -> Any:
    """Return the settings as a commit carries them."""
    return decode(encode({"optimizer": optimizer.settings()}))["optimizer"]


def test_settings_go_round() -> None:
    net = model()
    _, optimizer = taken_over(net, net.parameters(), lr=0.5, betas=(0.25, 0.5))
    _, other = taken_over(net, net.parameters(), lr=0.25)

    other.load_settings(carried(optimizer))

    assert row(other, 0) == row(optimizer, 0)
    assert other.param_groups[0]["betas"] == (0.25, 0.5)


def test_adam_goes_on_where_adamw_was_left_with_the_arithmetic_of_this_run() -> None:
    net = model()
    _, optimizer = taken_over(net, net.parameters(), lr=0.5)
    other = StoreOptimizer(Adam(net.parameters(), lr=0.25), list_parameters(net))

    other.load_settings(carried(optimizer))

    assert (type(row(other, 0)), row(other, 0).lr) == (pb.Adam, 0.5)


@pytest.mark.parametrize("corrects", [True, False])
def test_whether_the_bias_is_corrected_is_a_stored_setting(corrects: bool) -> None:
    net = model()
    optimizer = configured(net, "Adam", bias_correction=corrects)
    other = configured(net, "Adam", bias_correction=not corrects)

    other.load_settings(carried(optimizer))

    assert row(other, 0, 3) == row(optimizer, 0, 3)
    assert other.param_groups[0]["bias_correction"] is corrects


def test_a_commit_that_does_not_name_the_correction_of_the_bias_had_it() -> None:
    net = model()
    _, former = taken_over(net, net.parameters())
    other = configured(net, "AdamW", bias_correction=False)

    other.load_settings(carried(former))

    assert row(other, 0, 3).update_count == 3


def test_adam_goes_on_so_with_groups_that_were_added_to_adamw() -> None:
    net = model()
    _, optimizer = taken_over(net, [net[0].weight], lr=0.5)
    optimizer.add_param_group({"params": [net[1].weight], "lr": 0.125})
    other = StoreOptimizer(Adam([net[0].weight], lr=0.25), list_parameters(net))

    other.load_settings(carried(optimizer))

    added = row(other, 2)
    assert (type(added), added.lr) == (pb.Adam, 0.125)


@pytest.mark.parametrize("named", [False, True])
def test_groups_that_were_added_come_back_and_others_are_refused(named: bool) -> None:
    net = model()
    _, optimizer = taken_over(net, [net[0].weight], lr=0.5)
    optimizer.add_param_group({"params": [net[1].weight, net[1].bias, net[0].bias], "lr": 0.125})
    original, other = taken_over(net, [("first", net[0].weight)] if named else [net[0].weight], lr=0.25)

    other.load_settings(carried(optimizer))

    assert other.groups_of_parameters() == optimizer.groups_of_parameters()
    assert [group["lr"] for group in original.param_groups] == [0.5, 0.125]
    _, fewer = taken_over(net, [net[0].weight])
    with pytest.raises(ConfigError, match="has 2 parameter groups, the job was left with 1"):
        other.load_settings(carried(fewer))
    _, different = taken_over(net, [net[0].weight, net[1].bias])
    with pytest.raises(ConfigError, match=r"group 0 .* \(they differ in 1\.bias\)"):
        different.load_settings(carried(optimizer))
