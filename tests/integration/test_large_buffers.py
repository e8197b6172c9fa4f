"""Buffers for which the client state of a commit has no room: each step has them, in a slab of each rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainer_client
from paramserver.contract.buffer_names import has_buffers
from tests.integration.support.amending_ranks import Plan, play
from tests.integration.support.daemon import Daemon, Stores, serving
from tests.integration.support.model_runs import config_of, optimizer_of, start
from trainer_client import StoreClientSync
from trainer_client.copying.daemon_step import DaemonStep
from trainer_client.copying.verbs import backup, copy, restore
from trainer_client.exchange.export import export_step
from trainer_client.training.model.large_buffers import LargeBuffers

CONFIG = {"host_budget": "48MiB", "nvme_budget": "256MiB", "session_grace_seconds": 0.5}
STEPS = 6
SIZE = 300


class Coded(nn.Module):
    """A model whose losses depend on what its forwards have left in large buffers of several types."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("codes", torch.randn(size, size))
        self.register_buffer("seen", torch.zeros(size, size, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(size * 2, size * 2, dtype=torch.bool).tril())
        self.register_buffer("coarse", torch.zeros(size, size * 2, dtype=torch.bfloat16))
        self.codes: torch.Tensor
        self.seen: torch.Tensor
        self.mask: torch.Tensor
        self.coarse: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.norm(self.linear(inputs))
        with torch.no_grad():
            # `.data` hides the changes from torch's counters of versions.
            self.codes.data[: len(inputs), :8].lerp_(outputs.detach(), 0.1)
            self.seen[0, : len(inputs)] += 1
            self.coarse.data[0, :8] += outputs.detach().bfloat16()[0]
        return (outputs * self.codes[: len(inputs), :8]).square().mean() + self.seen[0, 0] + self.coarse[0, :8].sum()


def build(size: int = SIZE) -> Any:
    torch.manual_seed(0)
    return Coded(size)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()
    return train(model, optimizer_of(model), range(STEPS)), dict(model.named_buffers())


def config_for(address: str, job: str, stage: int = 3, **section: Any) -> dict[str, Any]:
    config = config_of(address, job, **section)
    if stage < 3:
        offload = {"offload_optimizer": {"device": "cpu"}} if stage else {}
        config["zero_optimization"] = {"stage": stage} | offload
    return config


def assert_same(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    assert [name for name, value in model.named_buffers() if not torch.equal(value, buffers[name])] == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_goes_on_with_the_buffers_of_its_last_step(model_store: str, job: str, stage: int) -> None:
    losses, config = [], config_for(model_store, job, stage)
    expected_losses, buffers = expected()
    for steps in (range(2), range(2, 4), range(4, STEPS)):
        model = build()
        engine = start(model, config)
        losses += train(engine, engine.optimizer, steps)
        engine.wait_for_commit()
        if steps.stop == STEPS:
            assert_same(model, buffers)
        # As with a kill, no end of the run commits anything.
        engine.close_without_commit()
    assert losses == expected_losses


@pytest.mark.parametrize("durability", ["snapshot:4", "none"])
def test_where_states_live_on_the_device_each_commit_has_them(model_store: str, job: str, durability: str) -> None:
    config = config_for(model_store, job, 0, durability=durability)
    losses = []
    for steps in (range(2), range(2, STEPS)):
        engine = start(build(), config)
        losses += train(engine, engine.optimizer, steps)
        # The end of a run commits its last step, unless no step is.
        engine.close()
        if durability == "none":
            break
    assert losses == expected()[0][: len(losses)]


def test_a_daemon_that_is_restarted_gets_them_again(tmp_path: Path) -> None:
    losses = []
    daemon = Daemon(tmp_path / "state", CONFIG)
    with start(build(), config_of(daemon.address, "job")) as engine:
        for step in range(STEPS):
            losses += train(engine, engine.optimizer, range(step, step + 1))
            daemon.kill()
            daemon = Daemon(tmp_path / "state", CONFIG)
        restarts = len(engine.daemon_restarts)
    with daemon, start(model := build(), config_of(daemon.address, "job")) as engine:
        assert engine.global_steps == STEPS
        assert_same(model, expected()[1])
    assert losses == expected()[0] and restarts


def test_what_does_not_change_is_written_once(model_store: str, job: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(SIZE * 2, SIZE * 2, dtype=torch.bool).tril())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.linear(inputs).square().mean()

    for _ in range(2):
        with start(Masked(), config_of(model_store, job)) as engine:
            train(engine, engine.optimizer, range(2))
    assert versions(model_store, job) == {0}


def versions(address: str, job: str) -> set[int | None]:
    """Return the steps in which the slabs with large buffers were written last."""
    with StoreClientSync.connect(address) as client, DaemonStep(client._connection, job) as step:
        return {slab.version for slab in step.description.slabs.values() if has_buffers(slab.group.shards[0].fqn)}


def test_readers_see_the_model_and_engines_and_exports_its_buffers(model_store: str, job: str, tmp_path: Path) -> None:
    model, buffers = build(), expected()[1]
    parameters = {name for name, _ in model.named_parameters()}
    with start(model, config_of(model_store, job)) as engine:
        train(engine, engine.optimizer, range(STEPS))
    with StoreClientSync.connect(model_store) as client, client.read(job) as reader:
        assert {tensor.fqn for tensor in reader.tensors()} == parameters
    result = export_step(model_store, job, None, tmp_path / "files")
    assert not result.left_out
    found = load_file(tmp_path / "files" / "model.safetensors")
    assert found.keys() == parameters | buffers.keys()
    assert all(torch.equal(found[name], value) for name, value in buffers.items())
    config = config_of(model_store, job, inference={"host_bytes": 0})
    torch.manual_seed(5)
    reference, _ = trainer_client.initialize(model=(other := Coded()), config=config)[:2]
    with reference:
        assert_same(other, buffers)


def test_a_job_of_before_and_one_with_other_buffers_go_on(
    model_store: str, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A release before this one has stored no large buffers; then the model gets larger ones, and then small ones."""
    config = config_of(model_store, job)
    with monkeypatch.context() as patch:
        patch.setattr("trainer_client.training.run.job.can_store", lambda _: False)
        with start(build(), config) as engine:
            train(engine, engine.optimizer, range(2))
    with caplog.at_level(logging.WARNING), start(build(), config) as engine:
        assert engine.global_steps == 2
        assert "codes, seen, mask and 1 more, buffers that the step does not have" in caplog.text
        train(engine, engine.optimizer, range(2, 3))
    for size in (SIZE, SIZE + 7, 8):
        with start(build(size), config) as engine:
            before = engine.global_steps
            train(engine, engine.optimizer, range(1))
            assert engine.global_steps == before + 1
    assert before == 5


def test_a_buffer_of_a_type_without_a_common_form_is_named(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(2):
        model = build()
        model.register_buffer("spectrum", torch.zeros(SIZE, SIZE, dtype=torch.complex128))
        with caplog.at_level(logging.WARNING), start(model, config_of(model_store, job)) as engine:
            assert engine.global_steps == step
            train(engine, engine.optimizer, range(1))
    assert "Today's values count for: spectrum, buffers that the step does not have." in caplog.text


def test_a_buffer_that_gets_another_shape_is_named(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start(model := build(), config_of(model_store, job)) as engine, caplog.at_level(logging.WARNING):
        train(engine, engine.optimizer, range(1))
        model.codes = torch.zeros(SIZE, SIZE + 1)
        train(engine, engine.optimizer, range(2))
    assert caplog.text.count("a buffer has another shape or dtype than at initialize()") == 1


def test_what_was_changed_after_the_last_step_is_committed_at_the_end_and_named_at_a_wait(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start(model := build(), config_of(model_store, job)) as engine:
        train(engine, engine.optimizer, range(1))
        model.codes.data.zero_()
        with caplog.at_level(logging.WARNING):
            engine.wait_for_commit()
        assert "what was changed after it in large buffers (codes)" in caplog.text
    with start(model := build(), config_of(model_store, job)):
        assert not model.codes.any()


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with serving(tmp_path, ("first", "second"), CONFIG) as daemons:
        yield Stores(*daemons)


def resumed(plan: Plan, directory: Path) -> tuple[list[Any], str]:
    """Run the ranks; return the step and the buffer's first elements that each has resumed with, and their output."""
    found, output = play(plan, directory)
    return [one[:2] for one in found], output


def test_each_rank_has_its_own(stores: Stores, tmp_path: Path) -> None:
    """Each commit has the changes after the step before. Rank r adds (1, r) after each step."""
    addresses = (stores.first.address, stores.second.address)
    plan = Plan(job="job", addresses=addresses, waiting=(0, 1), steps=3, elements=100_000)
    assert resumed(plan, tmp_path / "1")[0] == [[0, [0, 0]], [0, [0, 0]]]
    found, output = resumed(plan, tmp_path / "2")
    assert found == [[3, [2, 0]], [3, [2, 2]]]
    assert "The script has changed buffers after its steps (bias)" in output


def test_ranks_that_are_new_have_those_of_rank_0(model_store: str, job: str, tmp_path: Path) -> None:
    plan = Plan(job=job, addresses=(model_store,) * 2, waiting=(0, 1, 2), steps=3, elements=100_000)
    resumed(plan, tmp_path / "1")
    three = resumed(replace(plan, addresses=(model_store,) * 3), tmp_path / "2")[0]
    assert three == [[3, [2, 0]], [3, [2, 2]], [3, [2, 0]]]
    assert resumed(replace(plan, addresses=(model_store,)), tmp_path / "3")[0] == [[6, [4, 0]]]


def test_copies_and_backups_have_them(model_store: str, job: str, tmp_path: Path) -> None:
    with start(build(), config_of(model_store, job)) as engine:
        train(engine, engine.optimizer, range(STEPS))
    options: dict[str, Any] = {"step": None, "on_progress": lambda _: None}
    backup(job, model_store, str(tmp_path / "backup"), kept=None, keep_last=None, credentials={}, **options)
    with serving(tmp_path, ("copied", "restored"), CONFIG) as (copied, restored):
        restore(job, str(tmp_path / "backup"), restored.address, credentials={}, **options)
        options |= {"credentials": {}, "target_credentials": {}}
        copy(job, model_store, copied.address, kept=None, **options)
        for daemon in (copied, restored):
            with start(model := build(), config_of(daemon.address, job)) as engine:
                assert engine.global_steps == STEPS
                assert_same(model, expected()[1])


def test_the_digests_of_all_types_tell_a_changed_bit(model_store: str) -> None:
    model = build()
    with start(model, config_of(model_store, "digests")) as engine:
        large: LargeBuffers = engine._commits._buffers
        for name in large.names:
            buffer = dict(model.named_buffers())[name]
            buffer.data.view(-1).view(torch.uint8)[-1] ^= 1
            assert large.changed() == {name}
            large.note()
