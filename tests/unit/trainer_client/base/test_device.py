"""Which device a rank computes on, for machines with any number of devices, as far as torch says what there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError

from trainer_client import comm
from trainer_client.accelerator import get_accelerator
from trainer_client.base import device
from trainer_client.config.paramserver import ParamserverSection, configured_device_kind
from trainer_client.engine.held_model import _warning_of_graphs
from trainer_client.errors import ConfigError

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let torch find so many devices of a kind. The process has made no tensor on them."""

    def of(kind: str | None, count: int = 0, *, current: int = 0, local_rank: int | None = None) -> None:
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        monkeypatch.setattr(device, "_process", device._GpuProcess())
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return of


@pytest.mark.parametrize(
    ("setting", "kind", "count", "current", "local_rank", "chosen"),
    [
        ("auto", None, 0, 0, 3, "cpu"),
        ("auto", "cuda", 8, 0, 3, "cuda:3"),
        ("auto", "xpu", 2, 0, 1, "xpu:1"),
        ("auto", "cuda", 1, 0, 3, "cuda:0"),
        ("auto", "cuda", 8, 0, None, "cuda:0"),
        # The script has called set_device, which counts more than LOCAL_RANK.
        ("auto", "cuda", 8, 5, 3, "cuda:5"),
        ("cuda", "cuda", 8, 0, 7, "cuda:7"),
        ("cuda:2", "cuda", 4, 0, 7, "cuda:2"),
        ("cuda:0", "cuda", 4, 3, 1, "cuda:0"),
        ("cpu", "cuda", 4, 3, 1, "cpu"),
        ("cpu", None, 0, 0, 1, "cpu"),
    ],
)
def test_a_rank_computes_on_this_device(
    machine: Machine, setting: str, kind: str | None, count: int, current: int, local_rank: int | None, chosen: str
) -> None:
    machine(kind, count, current=current, local_rank=local_rank)

    assert device.choose(setting) == torch.device(chosen)


def test_a_rank_that_has_no_device_of_its_own_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("cuda", 2, local_rank=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")

    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 2.* sees 2 cuda devices.*CUDA_VISIBLE_DEVICES .*'4,5'"):
        device.choose("auto")
    with pytest.raises(ConfigError, match=r"'cuda:2'.* sees 2 cuda devices.*CUDA_VISIBLE_DEVICES"):
        device.choose("cuda:2")


def test_a_kind_that_torch_does_not_find_is_refused(machine: Machine) -> None:
    machine(None)
    with pytest.raises(ConfigError, match=r"paramserver.device is 'cuda:1', and torch finds no accelerator"):
        device.choose("cuda:1")
    machine("xpu", 1)
    with pytest.raises(ConfigError, match=r"paramserver.device is 'cuda', and torch finds xpu devices"):
        device.choose("cuda")


def test_all_faces_follow_the_device_that_was_chosen(machine: Machine) -> None:
    machine("cuda", 2, local_rank=1)

    assert get_accelerator().device_name() == "cuda"
    assert comm._backend(None) == "cpu:gloo,cuda:nccl"
    assert configured_device_kind({}) == "cuda"
    device.use(device.choose("cpu"))
    assert get_accelerator().device_name() == "cpu"
    assert comm._backend(None) == "gloo"
    with pytest.raises(ConfigError, match="uses no GPU"):
        comm._backend("nccl")
    assert configured_device_kind({"paramserver": {"device": "cpu"}}) == "cpu"


def test_nccl_is_told_the_device_and_gloo_is_not(machine: Machine) -> None:
    machine("cuda", 4, local_rank=3)
    backend = comm._backend(None)

    # Before a device is chosen, the script may still choose another one.
    assert comm._bound_device(backend) is None
    device.use(device.choose("auto"))
    assert comm._bound_device(backend) == torch.device("cuda:3")
    assert comm._bound_device("gloo") is None


def test_modes_of_compile_that_record_graphs_are_warned_of_on_accelerators_only() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")

    assert "'max-autotune-no-cudagraphs'" in (_warning_of_graphs(gpu, "reduce-overhead") or "")
    assert _warning_of_graphs(gpu, "max-autotune") is not None
    assert _warning_of_graphs(gpu, "max-autotune-no-cudagraphs") is None
    assert _warning_of_graphs(gpu, None) is None
    assert _warning_of_graphs(cpu, "reduce-overhead") is None


def test_a_device_of_which_torch_has_no_figures_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(given: torch.device) -> tuple[int, int]:
        if given.type == "cuda":
            return 5000, 9000
        raise NotImplementedError("no allocator to ask")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", figures)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda given: 3000)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda given: 1000)

    # Memory that torch has cached is free for this process.
    assert device.memory_bytes(torch.device("cuda", 0)) == (7000, 9000)
    assert device.memory_bytes(torch.device("xpu", 0)) is None


@pytest.mark.parametrize("value", ["auto", "cpu", "cuda", "cuda:12", "xpu:0"])
def test_the_key_takes_kinds_and_indexes(value: str) -> None:
    assert ParamserverSection(device=value).device == value


@pytest.mark.parametrize("value", ["", "gpu one", "cuda:", "cuda:x", "cpu:0", "auto:1", "CUDA", 3])
def test_the_key_refuses_all_else(value: object) -> None:
    with pytest.raises(ValidationError):
        ParamserverSection.model_validate({"device": value})
