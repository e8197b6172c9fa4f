"""Each key of the config says which ranks must have the same value, and a difference is shown in bounded text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from trainer_client.base.section import Agreement, Section
from trainer_client.config.loading import load_config
from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.ranks.agreement import _cut, _nodes, _who_has_what


def sections_of(annotation: Any) -> Iterator[type[Section]]:
    """Yield all sections in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_of(argument)


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Agreement | None]]:
    """Yield every key of the config with its Agreement, or with None if the key has none."""
    for name, field in section.model_fields.items():
        said = next((mark for mark in field.metadata if isinstance(mark, Agreement)), None)
        below = [key for each in sections_of(field.annotation) for key in keys(each, f"{prefix}{name}.")]
        if below and said is None:
            yield from below
        else:
            yield f"{prefix}{name}", said


def test_only_these_keys_may_differ_between_ranks() -> None:
    """A key without an Agreement must be the same on all ranks.

    The lists are repeated here, so that the author of a key decides on purpose that ranks may differ in it.
    """
    said = dict(keys(TrainingConfig))

    assert {key for key, agreement in said.items() if agreement is Agreement.NODE} == {
        "paramserver.host_budget",
        "paramserver.nvme_budget",
    }
    assert {key for key, agreement in said.items() if agreement is Agreement.NONE} == {
        "steps_per_print",
        "log_level",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_optimizer.nvme_path",
        "paramserver.device",
        "paramserver.gpu_budget",
        "paramserver.address",
        "paramserver.token_file",
        "paramserver.tls",
        "paramserver.insecure",
        "paramserver.state_dir",
        "paramserver.data.workers",
        "paramserver.inference.host_bytes",
        "paramserver.trace",
        "paramserver.telemetry",
    }
    assert said["zero_optimization.stage"] is None
    assert said["optimizer.params.lr"] is None


def test_values_are_given_as_far_as_they_are_set_and_never_those_of_credentials() -> None:
    raw = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "paramserver": {
            "address": "unix:/run/store.sock",
            "token_file": "/secret/token",
            "tls": {"ca": "/secret/ca", "certificate": "/secret/crt", "key": "/secret/key"},
            "placement": {"optimizer": {"host": 0.5, "nvme": 0.5}},
        },
    }
    config = load_config(raw, {})
    values = dict(config.values(Agreement.RUN))

    assert values["zero_optimization.stage"] == "2"
    assert values["optimizer.params.lr"] == "0.5"
    assert values["paramserver.placement.optimizer"] == '{"host": 0.5, "nvme": 0.5}'
    assert not any(key.startswith("zero_optimization.offload_param") for key in values)
    everything = [*values.items(), *config.daemon_values({}).items()]
    assert not any("secret" in text or "store.sock" in text for item in everything for text in item)


def test_the_state_directory_is_compared_however_it_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    nvme = {"device": "nvme", "nvme_path": "state"}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    ways = [
        {"zero_optimization": zero},
        {"paramserver": {"state_dir": str(tmp_path / "state")}},
    ]
    first, second = (load_config({"train_batch_size": 1} | way, {}).daemon_values({}) for way in ways)

    assert first == second
    assert first["paramserver.state_dir (or nvme_path)"] == f'"{tmp_path / "state"}"'


def test_a_node_has_each_local_rank_once() -> None:
    a, b = b"boot a", b"boot b"
    first, second = b"0", b"1"

    assert _nodes([(a, first), (a, second), (b, first), (b, second)]) == [[0, 1], [2, 3]]
    assert _nodes([(a, first), (b, first), (a, second), (b, second)]) == [[0, 2], [1, 3]]
    assert _nodes([(a, first), (a, first), (a, second)]) == [[0], [1, 2]]


def test_what_differs_is_shown_in_bounded_text() -> None:
    values = ["3", "2", "3", "3", "3", "2"]
    assert _who_has_what(values, range(6)) == "3 on ranks 0, 2-4; 2 on ranks 1, 5"
    assert _who_has_what(values, [1, 2]) == "2 on rank 1; 3 on rank 2"

    many = [_cut("x" * (1000 + rank % 7) if rank % 2 else f"{rank}") for rank in range(1000)]
    assert len(_who_has_what(many, range(1000))) < 1000
    assert _cut("x" * 1000) != _cut("x" * 1001)
