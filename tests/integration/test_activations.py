"""Boundaries of activation checkpoints in the store: the same bits as on the device, and nothing left afterwards."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from tests.integration.support.boundary_training import (
    AGAIN,
    BLOCKS,
    SMALL,
    TOKENS,
    WIDTH,
    Block,
    Training,
    assert_same,
    config,
    trained,
)
from tests.integration.support.daemon import MIB, Daemon, tiers
from tests.integration.support.parking import assert_nothing_left, small_and_plenty
from tests.integration.support.training import Run, assert_bit_equal, launch, train_through_store
from trainer_client.errors import DaemonRestartedError, StoreUnavailableError

# The losses and the weights of a training, and the function that returns those of a kind of training.
Trained = tuple[list[float], dict[str, torch.Tensor]]
OnDevice = Callable[[bool, int], Trained]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon with too little memory for all boundaries, and one with plenty."""
    with small_and_plenty(tmp_path_factory.mktemp("activations"), SMALL) as both:
        yield both


@pytest.fixture(scope="module")
def on_device(daemons: tuple[Daemon, Daemon]) -> OnDevice:
    """The losses and weights of two steps whose boundaries stay on the device. Each training runs once.

    The arguments say whether checkpoints are reentrant, and the number of micro-batches of a step.
    """

    @cache
    def train(reentrant: bool, accumulation: int) -> Trained:
        job = config(daemons[1], f"device-{reentrant}-{accumulation}", offload=False)
        return trained(2, job, reentrant=reentrant, accumulation=accumulation)

    return train


CASES = [(True, 1), (False, 1), (True, 3), (False, 3)]


@pytest.mark.parametrize(("reentrant", "accumulation"), CASES)
def test_boundaries_in_host_memory_and_on_nvme_give_the_same_bits(
    daemons: tuple[Daemon, Daemon], on_device: OnDevice, reentrant: bool, accumulation: int
) -> None:
    small, plenty = daemons
    name, how = f"hand-{reentrant}-{accumulation}", {"reentrant": reentrant, "accumulation": accumulation}
    expected = on_device(reentrant, accumulation)
    assert_same(trained(2, config(plenty, f"{name}-host"), **how), expected)
    assert_same(trained(2, config(small, f"{name}-nvme"), **how), expected)
    for daemon in daemons:
        assert_nothing_left(daemon)


def test_the_report_and_the_admin_tool_show_the_bytes(daemons: tuple[Daemon, Daemon]) -> None:
    for daemon, is_small in zip(daemons, (True, False), strict=True):
        training = Training(config(daemon, "shown"), reentrant=False)
        with training.engine:
            training.step(0)
            report = training.engine.step_report()
            assert report is not None
            # Besides the hidden states there are the two shared tensors, each of which is moved once.
            hidden, scale, chosen = (TOKENS * WIDTH * 4, TOKENS * WIDTH * 4, TOKENS * 8)
            assert sum(report.boundaries[kind] for kind in ("kept", "moved")) == BLOCKS * hidden + scale + chosen
            assert report.boundaries["again"] == 0
            assert report.boundaries["moved"] >= 10 * hidden
            assert bool(report.boundaries["spilled"]) is is_small
            loss = training.engine(torch.randn(TOKENS, WIDTH))
            host, nvme = tiers(daemon.address)
            assert host.activation_bytes and bool(nvme.activation_bytes) is is_small
            training.engine.backward(loss)
            training.engine.step()
        assert_nothing_left(daemon)


def test_gpt2_gives_the_same_bits_on_two_ranks_and_over_streams(daemons: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    kinds: list[Literal["reentrant", "non-reentrant"]] = ["reentrant", "non-reentrant"]
    runs = [
        Run(
            layers=6,
            steps=2,
            dropout=0.1,
            accumulation=accumulation,
            checkpointing=checkpointing,
            prefer_streams=streams,
            config=config(
                daemons[1],
                f"gpt2-{checkpointing}-{accumulation}-{streams}-{offload}-{again}",
                offload=offload,
                activations=AGAIN | {"recompute": again},
            ),
        )
        for checkpointing in kinds
        for accumulation, streams in ((1, False), (3, True))
        for offload, again in ((False, False), (True, False), (True, True))
    ]
    results = launch(runs, 2, tmp_path)
    for whole, moved, computed in zip(results[::3], results[1::3], results[2::3], strict=True):
        assert_bit_equal(moved, whole)
        assert_bit_equal(computed, whole)
    assert_nothing_left(daemons[1])


def test_gpt2_in_bf16_gives_the_same_bits(daemons: tuple[Daemon, Daemon]) -> None:
    found = [
        train_through_store(
            Run(
                layers=4,
                steps=3,
                precision="bf16",
                checkpointing="non-reentrant",
                config=config(daemons[0], f"bf16-{offload}", offload=offload),
            )
        )
        for offload in (False, True)
    ]
    assert_bit_equal(found[1], found[0])


def bytes_written(daemon: Daemon) -> int:
    """Return the bytes that the daemon has written to NVMe, once spills that are under way have ended."""
    before, after = -1, tiers(daemon.address)[1].bytes_written
    while before != after:
        time.sleep(0.3)
        before, after = after, tiers(daemon.address)[1].bytes_written
    return after


def test_errors_in_forward_and_evaluation_leave_nothing_and_change_nothing(
    daemons: tuple[Daemon, Daemon], on_device: OnDevice
) -> None:
    small, _ = daemons
    expected = on_device(False, 1)
    training = Training(config(small, "errors"), reentrant=False)
    training.step(0)
    batch = torch.randn(TOKENS, WIDTH)
    cast(Block, training.model.blocks[9]).fails = True
    with pytest.raises(ArithmeticError, match="planted"):
        training.engine(batch)
    cast(Block, training.model.blocks[9]).fails = False
    before = bytes_written(small)
    training.engine.eval()
    with torch.no_grad():
        training.engine(batch)
    assert bytes_written(small) == before
    # A forward with gradients whose graph is dropped gives its boundaries back.
    del batch
    training.engine(torch.randn(TOKENS, WIDTH))
    training.engine.train()
    training.step(1)
    assert_same(training.finish(), expected)
    assert_nothing_left(small)


@pytest.mark.parametrize(("reentrant", "recompute"), [(True, False), (False, False), (False, True)])
def test_an_error_in_backward_leaves_nothing_and_the_job_resumes(
    daemons: tuple[Daemon, Daemon], on_device: OnDevice, reentrant: bool, recompute: bool
) -> None:
    name = f"{reentrant}-{recompute}"
    expected = on_device(reentrant, 1)
    activations = AGAIN | {"recompute": recompute}
    job = config(daemons[0], f"backward-{name}", activations=activations)
    training = Training(job, reentrant=reentrant)
    training.step(0)
    loss = training.engine(torch.randn(TOKENS, WIDTH))
    cast(Block, training.model.blocks[5]).fails = True
    with pytest.raises(ArithmeticError, match="planted"):
        training.engine.backward(loss)
    training.engine.close_without_commit()
    # The store holds back the ranges that this process could still write to, as long as the failed engine has views.
    del loss, training
    gc.collect()
    again = Training(job, reentrant=reentrant)
    assert again.engine.resumed_step == 1
    again.losses = expected[0][:1]
    again.step(1)
    assert_same(again.finish(), expected)
    assert_nothing_left(daemons[0])


def test_a_boundary_that_is_changed_in_place_is_torchs_error(daemons: tuple[Daemon, Daemon]) -> None:
    training = Training(config(daemons[1], "changed"), reentrant=True)
    training.model.changes_boundary = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        training.engine.backward(training.engine(torch.randn(TOKENS, WIDTH)))
    training.engine.close_without_commit()
    assert_nothing_left(daemons[1])


def test_what_the_store_has_no_room_for_stays_and_is_logged_once(
    on_device: OnDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = {"host_budget": SMALL, "nvme_budget": "4MiB"}
    caplog.set_level(logging.WARNING, "trainer_client.training.step.activations")
    with Daemon(tmp_path / "full", budgets) as daemon:
        assert_same(trained(2, config(daemon, "full"), reentrant=False), on_device(False, 1))
        assert len([r for r in caplog.records if "stay on the device" in r.message]) == 1
        assert_nothing_left(daemon)


def test_the_daemon_is_killed_within_backward_and_the_job_resumes(on_device: OnDevice, tmp_path: Path) -> None:
    budgets = {"host_budget": SMALL, "nvme_budget": "1GiB"}
    with Daemon(tmp_path / "killed", budgets) as daemon:
        expected = on_device(False, 1)
        job = config(daemon, "killed")
        training = Training(job, reentrant=False)
        training.step(0)
        training.engine.wait_for_commit()
        loss = training.engine(torch.randn(TOKENS, WIDTH))
        daemon.kill()
        with Daemon(tmp_path / "killed", budgets) as again:
            with pytest.raises((DaemonRestartedError, StoreUnavailableError), match="activations"):
                training.engine.backward(loss)
            training.engine.close_without_commit()
            del loss
            resumed = Training(job, reentrant=False)
            assert resumed.engine.resumed_step == 1
            resumed.losses = expected[0][:1]
            resumed.step(1)
            assert_same(resumed.finish(), expected)
            assert_nothing_left(again)


# torch.compile looks at `.grad` of a block's input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_and_kept_bytes_give_the_same_bits(daemons: tuple[Daemon, Daemon], on_device: OnDevice) -> None:
    def run(job: dict[str, Any]) -> Trained:
        training = Training(job, reentrant=False)
        for block in training.model.blocks:
            block.compile(backend="aot_eager")
        for number in range(2):
            training.step(number)
        return training.finish()

    expected = run(config(daemons[1], "compiled-device", offload=False))
    assert_same(run(config(daemons[0], "compiled")), expected)
    assert_same(run(config(daemons[0], "compiled-again", activations=AGAIN)), expected)
    kept = config(daemons[0], "kept", activations={"smallest": 1024, "kept": 2 * MIB})
    assert_same(trained(2, kept, reentrant=False), on_device(False, 1))
    assert_nothing_left(daemons[0])


def test_the_settings_of_deepspeed(daemons: tuple[Daemon, Daemon], caplog: pytest.LogCaptureFixture) -> None:
    given = config(daemons[1], "settings")
    given["activation_checkpointing"] |= {"profile": True, "partition_activations": True, "number_checkpoints": 4}
    given["activation_checkpointing"] |= {"synchronize_checkpoint_boundary": True}
    with caplog.at_level(logging.INFO):
        trained(1, given, reentrant=False)
    text = caplog.text
    assert "boundaries of step 1:" in text
    assert "activation_checkpointing.partition_activations" in text
    assert "activation_checkpointing.number_checkpoints" in text
    assert_nothing_left(daemons[1])
