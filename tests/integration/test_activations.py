"""Boundaries of activation checkpoints in the store: the same bits as on the device, and nothing left afterwards."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import trainer_client
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import MIB, Daemon, admin_of, tiers
from tests.integration.support.parking import assert_nothing_left, small_and_plenty
from tests.integration.support.training import Run, assert_bit_equal, launch, train_through_store
from trainer_client.errors import DaemonRestartedError, StoreUnavailableError
from trainer_client.step.segments import Segment, Segments

WIDTH = 64
TOKENS = 2048
BLOCKS = 12
# The model leaves less of such a budget than the 6 MiB that its boundaries have.
SMALL = 5 * MIB


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon with too little memory for all boundaries, and one with plenty."""
    with small_and_plenty(tmp_path_factory.mktemp("activations"), SMALL) as both:
        yield both


# Each second boundary is computed again.
AGAIN = {"smallest": 1024, "recompute": True}


class Block(nn.Module):
    """A block whose inputs are of all kinds: not contiguous, integers, shared by all blocks, and views of these."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(
        self, hidden: torch.Tensor, scale: torch.Tensor, part: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the next hidden state, transposed as `hidden` [WIDTH, TOKENS] is."""
        if self.fails and torch.is_grad_enabled():
            raise ArithmeticError("planted")
        tokens = hidden.t()
        mixed = tokens[chosen] * scale[: tokens.shape[0]] + part.sum() * 1e-6
        return (tokens + torch.tanh(self.linear(mixed))).t()


class Model(nn.Module):
    """A model that checkpoints its blocks by itself."""

    def __init__(self, *, reentrant: bool, checkpoints: Callable[..., Any] = checkpoint) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.checkpoint = checkpoints
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.changes_boundary = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first(tokens).t()
        scale = tokens.abs().mean(1, keepdim=True).expand(-1, WIDTH).contiguous()
        chosen = tokens[:, 0].argsort()
        for block in self.blocks:
            before = hidden
            hidden = self.checkpoint(block, hidden, scale, scale[7:], chosen, use_reentrant=self.reentrant)
            if self.changes_boundary:
                with torch.no_grad():
                    before.add_(1.0)
        return hidden.square().mean()


def config(daemon: Daemon | None, job: str, *, offload: bool = True, **section: Any) -> dict[str, Any]:
    nvme = {"device": "nvme"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "activation_checkpointing": {"cpu_checkpointing": offload},
        "paramserver": {
            **({} if daemon is None else {"address": daemon.address}),
            "job": job,
            "durability": "step",
            "activations": {"smallest": 1024},
            **section,
        },
    }


class Training:
    """A training of the model, of which each micro-batch has other tokens."""

    def __init__(
        self,
        given: dict[str, Any],
        *,
        reentrant: bool,
        accumulation: int = 1,
        prepare: Callable[[Model], None] = lambda model: None,
        **initialize: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = Model(reentrant=reentrant)
        prepare(self.model)
        self.accumulation = accumulation
        given = given | {"gradient_accumulation_steps": accumulation}
        self.engine, *_ = trainer_client.initialize(model=self.model, config=given, **initialize)
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """Make a step of several forwards, whose losses have one backward pass each, the last forward's first."""
        generator = torch.Generator().manual_seed(number)
        batches = [torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(self.accumulation)]
        for batch in batches:
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.losses.append(loss.item())
            self.engine.step()

    def finish(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Close the engine; return the losses and the weights."""
        with self.engine:
            return self.losses, self.engine.full_state_dict()


def trained(steps: int, *arguments: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    training = Training(*arguments, **options)
    for number in range(steps):
        training.step(number)
    return training.finish()


def assert_same(
    found: tuple[list[float], dict[str, torch.Tensor]], expected: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert [name for name, value in found[1].items() if not torch.equal(value, expected[1][name])] == []


CASES = [(True, 1), (False, 1), (True, 3), (False, 3)]


@pytest.mark.parametrize(("reentrant", "accumulation"), CASES)
def test_boundaries_in_host_memory_and_on_nvme_give_the_same_bits(
    daemons: tuple[Daemon, Daemon], reentrant: bool, accumulation: int
) -> None:
    small, plenty = daemons
    name, how = f"hand-{reentrant}-{accumulation}", {"reentrant": reentrant, "accumulation": accumulation}
    expected = trained(2, config(plenty, f"{name}-device", offload=False), **how)
    assert_same(trained(2, config(plenty, f"{name}-host"), **how), expected)
    assert_same(trained(2, config(small, f"{name}-nvme"), **how), expected)
    for daemon in daemons:
        assert_nothing_left(daemon)


class Inside(Block):
    """A block that has the checkpoint within its forward, as those of transformers have."""

    def forward(self, *args: Any) -> Any:
        """Return what the block does."""
        return checkpoint(partial(Block.forward, self), *args, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "autocast", "accumulation"), [(Block, False, 3), (Block, True, 1), (Inside, False, 1)]
)
def test_boundaries_that_are_computed_again_give_the_same_bits(
    daemons: tuple[Daemon, Daemon], kind: type[Block], autocast: bool, accumulation: int
) -> None:
    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.__class__ = kind
        if kind is Inside:
            model.checkpoint = lambda block, *args, use_reentrant: block(*args)
        # A computation that calls one of these hooks twice, or not at all, has other values.
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0], args[1] * 1.25, *args[2:]))
            block.register_forward_hook(lambda *given: given[-1] * 0.75)

    results = []
    for number, (offload, again) in enumerate(((False, False), (True, True))):
        job = f"again-{kind.__name__}-{autocast}"
        given = config(daemons[number], job, offload=offload, activations=AGAIN | {"recompute": again})
        if autocast:
            given["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        training = Training(given, reentrant=False, accumulation=accumulation, prepare=prepare)
        # These hooks are called before those of the engine.
        for block in training.model.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0], args[1] * 0.9, *args[2:]), prepend=True)
        for step in range(2):
            training.step(step)
        report = training.engine.step_report()
        assert report is not None
        # The outputs of blocks 0, 2, 4, 6 and 8 are not kept, and that of block 10 stays because it is the newest.
        itemsize = 2 if autocast else 4
        assert report.boundaries["again"] == (accumulation * 5 * TOKENS * WIDTH * itemsize if again else 0)
        results.append(training.finish())
    assert_same(results[1], results[0])
    for daemon in daemons:
        assert_nothing_left(daemon)


class Borrowing(Block):
    """A block that computes with a weight of another unit, too."""

    lenders: Sequence[nn.Linear]

    def forward(self, *args: Any) -> Any:
        """Return what the block does, and add a column [WIDTH, 1] of the other unit's weight."""
        return super().forward(*args) + self.lenders[0].weight[:, :1]


@pytest.mark.parametrize("special", ["tiles", "a weight of another unit"])
def test_tiles_and_weights_of_other_units_have_the_same_bits_when_computed_again(
    daemons: tuple[Daemon, Daemon], special: str
) -> None:
    def prepare(model: Model) -> None:
        for block in cast(Iterable[Block], model.blocks if special != "tiles" else []):
            block.__class__ = Borrowing
            cast(Borrowing, block).lenders = [model.first]

    # The weight of a block has 16 KiB.
    section: dict[str, Any] = {"tiling": {"largest_tile": "4KiB"}} if special == "tiles" else {}
    results = []
    for number, again in enumerate((False, True)):
        job = f"{special} {again}"
        given = config(daemons[number], job, activations=AGAIN | {"recompute": again}, **section)
        training = Training(given, reentrant=False, accumulation=2, prepare=prepare)
        for step in range(2):
            training.step(step)
        report = training.engine.step_report()
        assert report is not None
        assert report.boundaries["again"] == (2 * 5 * TOKENS * WIDTH * 4 if again else 0)
        results.append(training.finish())
    assert_same(results[1], results[0])
    for daemon in daemons:
        assert_nothing_left(daemon)


def test_hooks_that_draw_random_numbers_before_a_block_have_them_again(daemons: tuple[Daemon, Daemon]) -> None:
    """The generators go on from the hook's numbers to those of the dropout."""

    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.register_forward_hook(lambda *given: nn.functional.dropout(given[-1], 0.5))

    def noisy(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0], args[1] + 0.1 * torch.randn_like(args[1]), *args[2:])

    results = []
    for number, again in enumerate((False, True)):
        given = config(daemons[number], f"drawing {again}", offload=again, activations=AGAIN | {"recompute": again})
        training = Training(given, reentrant=False, prepare=prepare)
        for block in training.model.blocks:
            block.register_forward_pre_hook(noisy, prepend=True)
        torch.manual_seed(3)
        training.step(0)
        report = training.engine.step_report()
        assert report is not None and bool(report.boundaries["again"]) is again
        results.append(training.finish())
    assert_same(results[1], results[0])


class CutModel(nn.Module):
    """A model that cuts its sequence after the first block, as one does that learns the length of its batch there."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss for `tokens` [TOKENS, WIDTH]."""
        hidden = self.first(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
            if block is self.blocks[0]:
                hidden = hidden[: self.longest]
        return hidden.square().mean()


def test_the_same_blocks_are_computed_again_whatever_the_length_of_the_batch(daemons: tuple[Daemon, Daemon]) -> None:
    """Ranks of different lengths would wait for each other's blocks otherwise, if they gather them together."""
    numbers = []
    for longest in (TOKENS, TOKENS // 2):
        engine, *_ = trainer_client.initialize(
            model=CutModel(longest), config=config(daemons[1], f"cut {longest}", activations=AGAIN)
        )
        with engine:
            engine.backward(engine(torch.randn(TOKENS, WIDTH)))
            engine.step()
            report = engine.step_report()
            assert report is not None
            numbers.append(report.boundaries["again"] / (longest * WIDTH * 4))
    # The outputs of the blocks 1, 3, 5 and 7. That of block 9 stays because it is the newest.
    assert numbers == [4, 4]


class ExitingModel(Model):
    """A model with a second loss, of the output of its fifth block, which is computed again."""

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return both losses."""
        hidden = self.first(tokens).t()
        scale = tokens.abs().mean(1, keepdim=True).expand(-1, WIDTH).contiguous()
        chosen = tokens[:, 0].argsort()
        losses = []
        for number, block in enumerate(self.blocks):
            hidden = checkpoint(block, hidden, scale, scale[7:], chosen, use_reentrant=False)
            if number in (4, BLOCKS - 1):
                losses.append(hidden.square().mean())
        return tuple(losses)


def test_a_block_that_runs_again_after_its_own_backward_leaves_nothing(
    daemons: tuple[Daemon, Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks on the graph of that forward, which has no backward, once kept its inputs for good."""
    inputs = []
    run_again = Segments._run

    def watched(self: Segments, segment: Segment, *args: Any) -> torch.Tensor:
        def note(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            inputs.append(StorageWeakRef(given[0].untyped_storage()))

        handle = segment.module.register_forward_pre_hook(note)
        try:
            return run_again(self, segment, *args)
        finally:
            handle.remove()

    monkeypatch.setattr(Segments, "_run", watched)
    torch.manual_seed(1)
    model = ExitingModel(reentrant=False)
    engine, *_ = trainer_client.initialize(model=model, config=config(daemons[1], "exits", activations=AGAIN))
    with engine:
        for _ in range(2):
            early, late = engine(torch.randn(TOKENS, WIDTH))
            engine.backward(early, retain_graph=True)
            engine.backward(late)
            engine.step()
            del early, late
        gc.collect()
        # In each step five blocks run again, one of them in the pass after its own.
        assert len(inputs) == 10
        assert all(reference.expired() for reference in inputs)
    assert_nothing_left(daemons[1])


def enclosing(block: Block, *args: Any, use_reentrant: bool) -> Any:
    """Checkpoint a function that calls the block, and may do more."""
    return checkpoint(lambda *given: block(*given) * 1.5, *args, use_reentrant=use_reentrant)


class Scaled(Block):
    """A block that has a factor."""

    factor = 1.0

    def forward(self, *args: Any) -> torch.Tensor:
        """Return what the block does, times the factor."""
        return super().forward(*args) * self.factor


def halved(block: Block, *args: Any) -> Any:
    """Call a block, which is a Scaled, with another factor."""
    cast(Scaled, block).factor = 0.5
    try:
        return block(*args)
    finally:
        cast(Scaled, block).factor = 1.0


def partly_enclosing(block: Block, *args: Any, use_reentrant: bool) -> Any:
    """Checkpoint a partial of a function that does more than to call the block."""
    return checkpoint(partial(halved, block), *args, use_reentrant=use_reentrant)


@pytest.mark.parametrize(
    ("reentrant", "checkpoints"), [(True, checkpoint), (False, enclosing), (False, partly_enclosing)]
)
def test_checkpoints_that_are_reentrant_or_enclose_more_than_a_block_compute_no_boundary_again(
    daemons: tuple[Daemon, Daemon], reentrant: bool, checkpoints: Callable[..., Any]
) -> None:
    def enclose(model: Model) -> None:
        model.checkpoint = checkpoints
        for block in model.blocks:
            block.__class__ = Scaled

    how: dict[str, Any] = {"reentrant": reentrant, "prepare": enclose}
    name = checkpoints.__name__
    expected = trained(1, config(daemons[1], f"not-again-device-{name}", offload=False), **how)
    training = Training(config(daemons[0], f"not-again-{name}", activations=AGAIN), **how)
    training.step(0)
    report = training.engine.step_report()
    assert report is not None and report.boundaries["again"] == 0
    assert_same(training.finish(), expected)


def test_a_run_whose_boundaries_find_no_room_computes_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Daemon(tmp_path / "full", {"host_budget": SMALL, "nvme_budget": "4MiB"}) as daemon:
        training = Training(config(daemon, "full"), reentrant=False)
        again = []
        with caplog.at_level(logging.INFO, "trainer_client.step.recompute_choice"), training.engine:
            for step in range(13):
                training.step(step)
                report = training.engine.step_report()
                assert report is not None
                again.append(report.boundaries["again"])
        assert again == [0] * 6 + [5 * TOKENS * WIDTH * 4] * 7
        assert "is computed again from now on" in caplog.text
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


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_gpt2_gives_the_same_bits_on_two_ranks_and_over_streams(
    daemons: tuple[Daemon, Daemon], tmp_path: Path, checkpointing: Any
) -> None:
    runs = [
        Run(
            layers=6,
            steps=3,
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


def test_errors_in_forward_and_evaluation_leave_nothing_and_change_nothing(daemons: tuple[Daemon, Daemon]) -> None:
    small, plenty = daemons
    expected = trained(2, config(plenty, "errors-device", offload=False), reentrant=False)
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
    daemons: tuple[Daemon, Daemon], reentrant: bool, recompute: bool
) -> None:
    name = f"{reentrant}-{recompute}"
    expected = trained(2, config(daemons[1], f"backward-device-{name}", offload=False), reentrant=reentrant)
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
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Daemon(tmp_path / "full", {"host_budget": SMALL, "nvme_budget": "4MiB"}) as daemon, ExitStack() as stack:
        expected = trained(2, config(daemon, "full-device", offload=False), reentrant=False)
        with admin_of(daemon.address) as admin:
            admin.DeleteJob(admin_pb.DeleteJobRequest(job="full-device"), timeout=30)
        stack.enter_context(caplog.at_level(logging.WARNING, "trainer_client.step.activations"))
        assert_same(trained(2, config(daemon, "full"), reentrant=False), expected)
        assert len([r for r in caplog.records if "stay on the device" in r.message]) == 1
        assert_nothing_left(daemon)


def test_the_daemon_is_killed_within_backward_and_the_job_resumes(tmp_path: Path) -> None:
    budgets = {"host_budget": SMALL, "nvme_budget": "1GiB"}
    with Daemon(tmp_path / "killed", budgets) as daemon:
        expected = trained(2, config(daemon, "killed-device", offload=False), reentrant=False)
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
def test_compiled_blocks_and_kept_bytes_give_the_same_bits(daemons: tuple[Daemon, Daemon]) -> None:
    def run(job: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
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
    assert_same(trained(2, kept, reentrant=False), trained(2, config(daemons[1], "on", offload=False), reentrant=False))
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
