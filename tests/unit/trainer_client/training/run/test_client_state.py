"""The client state comes back as it was given, as JSON."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

from trainer_client.errors import ClientStateError
from trainer_client.training.run.client_state import (
    check,
    decode,
    derived_random_states,
    encode,
    random_states,
    restore_random_states,
)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1.5, "x", None, True]},
        {"nested": {"tuple": (1, (2, [3]))}},
        {"int keys": {1: "one", (2, 3): "pair"}},
        {"$tensor": "a user's own key with a dollar"},
        {"counter": Counter([3, 3, 5])},
        {"float": 0.1 + 0.2, "infinite": math.inf},
    ],
)
def test_values_come_back_equal_and_of_the_same_type(value: dict[str, Any]) -> None:
    restored = decode(encode(value))

    assert restored == value
    assert repr(restored) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)

    restored = decode(encode({"t": tensor}))["t"]

    assert restored.dtype == dtype
    assert torch.equal(restored, tensor)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array(1e-3), 1e-3),
        (np.array(7), 7),
        (Fraction(1, 2), 0.5),
    ],
)
def test_scalars_of_numpy_come_back_as_plain_numbers(value: Any, plain: float) -> None:
    restored = decode(encode({"optimizer": [{"lr": value}]}))["optimizer"][0]["lr"]

    assert (restored, type(restored)) == (plain, type(plain))


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ({1, 2}, "is a set: only numbers.* write sorted"),
        (Path("a"), r"is a PosixPath: only numbers.* write str\(\.\.\.\)"),
        (np.zeros(2), r"is a ndarray: only numbers.* write torch\.from_numpy"),
        (np.longdouble(1) / 3, r"is a longdouble: only numbers.* write float"),
        (Fraction(1, 3), r"is a Fraction: only numbers.* write float"),
        (b"raw", r"is a bytes: only numbers.* write a tensor of torch\.uint8"),
    ],
)
def test_what_no_value_of_json_equals_is_refused_with_what_to_write(value: Any, remedy: str) -> None:
    with pytest.raises(ClientStateError, match=rf"^client state\.user\.it {remedy}"):
        encode({"user": {"it": value}})


def test_a_check_gives_the_size_that_the_value_has_in_a_state() -> None:
    value = {"seen": [1, 2.5, (None, torch.arange(3))]}

    assert check(value, "engine.client_state") == len(encode({"user": value})) - len(encode({"user": 0})) + 1
    with pytest.raises(ClientStateError, match=r"^engine\.client_state\.seen\[1\] is a set"):
        check({"seen": [0, {1}]}, "engine.client_state")


def test_an_object_is_refused_by_its_place() -> None:
    with pytest.raises(ClientStateError, match=r"client state\.user\.cursors\[1\] is a object"):
        encode({"user": {"cursors": [0, object()]}})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["sparse", "conjugated", "meta", "nested"],
)
def test_a_tensor_without_plain_bytes_is_refused_by_its_place(tensor: torch.Tensor) -> None:
    with pytest.raises(ClientStateError, match=r"client state\.user\[0\] is a tensor that cannot be committed"):
        encode({"user": [tensor]})


@pytest.mark.parametrize("stored", [b"", b"[]", b'{"format":99,"state":{}}', b"\x80\x04N."])
def test_what_this_version_did_not_write_is_refused(stored: bytes) -> None:
    with pytest.raises(ClientStateError):
        decode(stored)


def test_random_generators_continue_where_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.standard_normal())

    draw()  # numpy draws normal numbers in pairs, and now keeps the second of a pair.
    saved = encode({"random": random_states(torch.device("cpu"))})
    first = [draw() for _ in range(3)]

    restore_random_states(decode(saved)["random"], torch.device("cpu"))

    assert [draw() for _ in range(3)] == first


@pytest.mark.parametrize("kind", ["multistep", "onecycle"])
def test_schedulers_continue_where_they_were(kind: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        if kind == "multistep":
            return optimizer, MultiStepLR(optimizer, [2, 4, 4])
        return optimizer, OneCycleLR(optimizer, max_lr=1.0, total_steps=20)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer, scheduler = make()
    rates(optimizer, scheduler, 3)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    saved = encode({"scheduler": scheduler.state_dict(), "group": group})
    expected = rates(optimizer, scheduler, 4)

    resumed_optimizer, resumed_scheduler = make()
    state = decode(saved)
    resumed_optimizer.param_groups[0].update(state["group"])
    resumed_scheduler.load_state_dict(state["scheduler"])

    assert rates(resumed_optimizer, resumed_scheduler, 4) == expected


def test_the_encoding_is_json() -> None:
    assert json.loads(encode({"a": (1,)}))["state"] == {"a": {"$tuple": [1]}}


def test_a_new_rank_has_random_states_that_follow_from_another_rank_and_its_number() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.standard_normal())

    device = torch.device("cpu")
    mine = random_states(device)
    drawn = []
    for states, rank in ((mine, 1), (mine, 1), (mine, 2)):
        restore_random_states(decode(encode(derived_random_states(states, rank))), device)
        drawn.append(draw())
    moved = random_states(device)
    restore_random_states(derived_random_states(moved, 1), device)
    drawn.append(draw())
    assert drawn[0] == drawn[1]
    # Another rank, or another state to derive from, gives other numbers for each generator.
    for numbers in zip(*drawn[1:], strict=True):
        assert len(set(numbers)) == 3
    restore_random_states(mine, device)


class _GeneratorOfADevice:
    """What torch has for a kind of device: a generator, whose numbers `draw` gives."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self._generator.set_state(state)

    def draw(self) -> float:
        return torch.rand((), generator=self._generator).item()


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_generator_of_any_accelerator_goes_on(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = _GeneratorOfADevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: generator)
    saved = encode(random_states(torch.device(kind, 0)))
    first = [generator.draw() for _ in range(3)]

    restore_random_states(decode(saved), torch.device(kind, 1))

    assert [generator.draw() for _ in range(3)] == first
    assert caplog.records == []


@pytest.mark.parametrize(("before", "now"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "xpu")])
def test_a_commit_of_another_kind_of_device_leaves_the_generator_and_says_so(
    before: str, now: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generators = {kind: _GeneratorOfADevice() for kind in ("cuda", "xpu")}
    monkeypatch.setattr(torch, "get_device_module", lambda device: generators[torch.device(device).type])
    saved = encode(random_states(torch.device(before)))
    untouched = {kind: generator.get_rng_state(torch.device(kind)) for kind, generator in generators.items()}

    restore_random_states(decode(saved), torch.device(now))

    (record,) = caplog.records
    assert f"committed on {before}, and this rank computes on {now}" in record.getMessage()
    for kind, generator in generators.items():
        assert torch.equal(generator.get_rng_state(torch.device(kind)), untouched[kind])
