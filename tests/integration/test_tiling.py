"""Layers in tiles: the numbers of whole layers to rounding, unchanged names, and at most two gathered tiles at once."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.gathered_units import counting_gathered
from tests.integration.support.memory_ranks import MIB
from tests.integration.support.model_runs import config_of, start
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import (
    Result,
    Run,
    assert_bit_equal,
    build_model,
    launch,
    make_optimizer,
    micro_batches,
    train_through_store,
)
from tests.integration.support.width_ranks import DAEMON, FEATURES, LAYER_BYTES, TOKENS, VOCABULARY
from trainer_client import ConfigError, TiledParameterError

# GPT-2 here has a tied weight of 66 kB and matrices of 16 to 66 kB; the other model a tied weight with a bias of 25 kB.
SIXTEEN = {"largest_tile": "16KiB", "loss_tokens": 24}
FOUR = {"largest_tile": "4KiB"}
RUNS: dict[str, tuple[Run, dict[str, Any], str]] = {
    "fp32 on nvme": (Run(steps=3, clipping=0.5, accumulation=2), SIXTEEN, "nvme"),
    "bf16 on the host": (Run(steps=3, precision="bf16", accumulation=2), SIXTEEN, "cpu"),
    "reentrant": (Run(steps=3, model="conditional", checkpointing="reentrant"), FOUR, "nvme"),
    "non-reentrant": (Run(steps=3, model="conditional", checkpointing="non-reentrant"), FOUR, "cpu"),
    "autocast": (Run(steps=3, accumulation=2), SIXTEEN, "nvme"),
    "autocast, checkpointed": (Run(steps=3, model="conditional", checkpointing="non-reentrant"), FOUR, "cpu"),
}
AUTOCAST = {"torch_autocast": {"enabled": True}}


def both(address: str, job: str) -> list[Run]:
    """Return each run with whole layers, and then with tiles."""
    runs = []
    for name, (run, tiling, device) in RUNS.items():
        sections: list[dict[str, Any]] = [{}, {"tiling": tiling}]
        for section in sections:
            config = config_of(address, f"{job} {name} {bool(section)}", device, **section)
            runs.append(replace(run, config=config | (AUTOCAST if name.startswith("autocast") else {})))
    return runs


def assert_close(tiled: Result, whole: Result, precision: str) -> None:
    # In fp32, layers in tiles add up in another order. In bf16 they also round each part of the gradients of inputs to
    # 8 bits. The gradients of some biases would be 0 without rounding, so AdamW makes steps of the whole learning rate,
    # 0.01, in directions that only the rounding decides.
    rtol = 1e-4 if precision == "fp32" else 2e-2
    torch.testing.assert_close(tiled.losses, whole.losses, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(tiled.norms, whole.norms, rtol=1e-3, atol=1e-5)
    assert list(tiled.weights) == list(whole.weights)
    learnt = 2e-3 if precision == "fp32" else 2 * 0.01 * 3
    torch.testing.assert_close(tiled.weights, whole.weights, rtol=1e-3, atol=learnt)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tiles_compute_what_whole_layers_compute(model_store: str, job: str, tmp_path: Path, world_size: int) -> None:
    results = iter(launch(both(model_store, job), world_size, tmp_path))

    for name, (run, _, _) in RUNS.items():
        whole, tiled = next(results), next(results)
        assert_close(tiled, whole, "bf16" if name.startswith("autocast") else run.precision)


@pytest.mark.parametrize("name", ["fp32 on nvme", "reentrant", "non-reentrant"])
def test_at_most_two_tiles_are_gathered_at_once(
    model_store: str, job: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, tiling, _ = RUNS[name]
    # Parameters on NVMe are copied and not mapped, so a released tile is not kept.
    config = config_of(model_store, job, "nvme", tiling=tiling)

    with counting_gathered(monkeypatch, lambda unit: unit.tile is not None) as seen:
        train_through_store(replace(run, steps=2, config=config))

    # Each tile of the tied weight is used by the embedding and by the head, in forward and in backward.
    assert len(seen) > 2 * 4 * 5
    assert max(seen) <= 2


def test_a_killed_run_goes_on_with_the_bits_of_an_uninterrupted_one(model_store: str, job: str, tmp_path: Path) -> None:
    run = Run(steps=6, clipping=0.5)
    whole = train_through_store(replace(run, config=config_of(model_store, job, "nvme", tiling=SIXTEEN)))

    # A Daemon is killed at the end of its context.
    daemon = partial(Daemon, tmp_path / "state", {"host_budget": "64MiB", "nvme_budget": "256MiB"})
    config = config_of(f"unix:{tmp_path}/state/paramserver.sock", job, "nvme", tiling=SIXTEEN)
    losses: list[float] = []
    for end in (2, 6):
        with daemon():
            part = train_through_store(replace(run, steps=end, config=config))
            losses += part.losses

    assert losses == whole.losses
    assert_bit_equal(replace(part, losses=losses, norms=whole.norms), whole)


def states_of(engine: trainer_client.Engine) -> dict[str, torch.Tensor]:
    """Return the weights and moments of the engine's job by name."""
    states = dict(engine.full_state_dict())
    for name, _ in engine.module.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = engine.get_full(name, kind)
            assert moment is not None
            states[f"{name}/{kind}"] = moment
    return states


def test_names_and_bits_stay_while_a_job_goes_into_tiles_and_back(model_store: str, job: str, tmp_path: Path) -> None:
    run = Run()
    batches = list(micro_batches(3))
    before: dict[str, torch.Tensor] = {}
    sections: list[dict[str, Any]] = [{}, {"tiling": SIXTEEN}, {"tiling": "40KiB"}, {}]
    for number, section in enumerate(sections):
        model = build_model(run)
        names = [name for name, _ in model.named_parameters()]
        engine = start(model, config_of(model_store, job, "nvme", **section))
        with engine:
            states = states_of(engine)
            assert [name for name, _ in engine.module.named_parameters()] == names
            if before:
                assert states.keys() == before.keys()
                assert all(torch.equal(states[name], before[name]) for name in before)
            if number < 3:
                engine.backward(engine(input_ids=batches[number], labels=batches[number]).loss)
                engine.step()
            before = states_of(engine)
            files = tmp_path / str(number)
            engine.export("safetensors", files)
        exported = load_file(files / "model.safetensors")
        assert exported.keys() <= before.keys()
        assert all(torch.equal(exported[name].float(), before[name]) for name in exported)
        assert len(exported) >= len(names)


def test_states_of_a_tiled_parameter_are_read_and_changed_as_those_of_a_whole_one(model_store: str, job: str) -> None:
    model: Any = build_model(Run())
    engine = start(model, config_of(model_store, job, "nvme", tiling=SIXTEEN))
    name, parameter = "transformer.h.0.mlp.c_fc.weight", model.transformer.h[0].mlp.c_fc.weight
    (batch,) = micro_batches(1)
    reference = build_model(Run())
    reference(input_ids=batch, labels=batch).loss.backward()
    with engine:
        with pytest.raises(TiledParameterError, match="never whole"):
            parameter + 1
        before = engine.get_full(name, "master")
        assert before is not None
        with engine.gathered([parameter], modifier_rank=0), torch.no_grad():
            assert torch.equal(parameter, before)
            parameter[:, 3] = 1.0
            reference.get_parameter(name)[:, 3] = 1.0
            # A forward within the context computes with the change, as `generate` after a merge of adapters.
            torch.testing.assert_close(engine(input_ids=batch).logits, reference(input_ids=batch).logits)
            reference.get_parameter(name).copy_(before)
        changed = engine.get_full(parameter, "param")
        assert changed is not None
        assert changed.shape == before.shape
        assert torch.equal(changed[:, 3], torch.ones(len(changed)))
        assert torch.equal(changed[:, 4:], before[:, 4:])
        engine.set_full(name, "master", before)

        shard = engine.sharded_state_dict()[name]
        assert sum(count for _, count in shard.ranges) == shard.values.numel() == before.numel()
        assert torch.equal(shard.values.view(before.shape), before)

        engine.backward(engine(input_ids=batch, labels=batch).loss)
        gradient = engine.get_full(name, "grad")
        expected = dict(reference.named_parameters())[name].grad
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        engine.set_full(name, "grad", torch.zeros_like(before))
        local = engine.get_local(name, "grad")
        assert local is not None
        assert not local.any()
        engine.step()

        weights = engine.full_state_dict()
        engine.give_up_model()
        model.load_state_dict(weights)
        plain: Any = build_model(Run())
        plain.load_state_dict(weights)
        assert torch.equal(model(input_ids=batch).logits, plain(input_ids=batch).logits)


def test_a_frozen_tiled_layer_is_not_trained(model_store: str, job: str) -> None:
    model = build_model(Run())
    optimizer, _ = make_optimizer(model, Run())
    config = config_of(model_store, job, "nvme", tiling=SIXTEEN)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=config)
    name = "transformer.h.1.mlp.c_proj.weight"
    with engine:
        for frozen, batch in zip((True, False), micro_batches(2), strict=True):
            before = engine.get_full(name, "master")
            dict(model.named_parameters())[name].requires_grad_(not frozen)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            after = engine.get_full(name, "master")
            assert before is not None
            assert after is not None
            assert torch.equal(before, after) is frozen


def test_a_weight_with_hooks_on_its_gradient_stays_whole_and_a_tiled_one_takes_none(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Autograd knows nothing of a tiled parameter, so a hook that masks its gradient would never be called."""
    model = build_model(Run())
    hooked = "transformer.h.0.mlp.c_proj.weight"
    dict(model.named_parameters())[hooked].register_hook(torch.zeros_like)
    optimizer, _ = make_optimizer(model, Run())
    config = config_of(model_store, job, "nvme", tiling=SIXTEEN)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=config)
    with engine:
        assert f"{hooked} (64.0 KiB: it has hooks on its gradient)" in caplog.text
        (batch,) = micro_batches(1)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        gradient = engine.get_full(hooked, "grad")
        assert gradient is not None and not gradient.any()
        weight: Any = dict(model.named_parameters())["transformer.h.1.mlp.c_proj.weight"]
        for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
            with pytest.raises(TiledParameterError, match=r"transformer\.h\.1\.mlp\.c_proj\.weight"):
                register(lambda _: None)
        engine.step()


def test_tiling_is_refused_where_parameters_stay_whole(model_store: str, job: str) -> None:
    config = config_of(model_store, job, "cpu", tiling=SIXTEEN)
    config["zero_optimization"] = {"stage": 2}

    with pytest.raises(ConfigError, match=r"set the stage to 3, or largest_tile to null"):
        start(build_model(Run()), config)


# A rank needs this memory besides tiles: for activations, for what the heap keeps, and for buffers of gRPC and torch;
# see test_memory.py.
OVERHEAD_BYTES = 40 * MIB


@pytest.mark.parametrize(("world_size", "kind"), [(1, "frozen"), (1, "trained"), (2, "trained")])
def test_a_layer_of_four_times_the_host_budget_trains_and_is_never_whole_in_a_rank(
    tmp_path: Path, world_size: int, kind: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    between = torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5
    for name, vocabulary in (("small", 1024), ("large", VOCABULARY)):
        weight = torch.randn(vocabulary, FEATURES, generator=generator) / 32
        save_file({"embedding.weight": weight, "between.weight": between}, tmp_path / f"{name}.safetensors")

    with Daemon(tmp_path / "small", DAEMON) as small, Daemon(tmp_path / "large", DAEMON) as large:
        module = "tests.integration.support.width_ranks"
        run_ranks(module, world_size, tmp_path, kind, small.address, large.address)

    # The first loss is that of the whole layers.
    (tokens,) = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    logits = torch.tanh(weight[tokens] @ between.t()) @ weight.t()
    expected = torch.nn.functional.cross_entropy(logits, tokens.roll(-1)).item()
    for rank in range(world_size):
        result = json.loads((tmp_path / f"result-{rank}.json").read_text())
        assert rank or result["losses"][0] == pytest.approx(expected, rel=1e-5)
        assert result["peak"] <= OVERHEAD_BYTES < LAYER_BYTES / 2


class Shared(torch.nn.Module):
    """A model that uses one layer twice in a forward, and leaves the loss to its caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(257, 64)
        self.twice = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 257)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.twice(torch.relu(self.twice(self.embedding(tokens))))
        return hidden


def test_a_layer_may_be_used_twice_and_the_loss_be_computed_outside_of_the_model(
    model_store: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(2))
    plain = Shared()
    torch.nn.functional.cross_entropy(plain.head(plain(tokens)).flatten(0, 1), tokens.flatten()).backward()

    with counting_gathered(monkeypatch, lambda unit: unit.tile is not None) as seen:
        model = Shared()
        engine = start(model, config_of(model_store, job, "nvme", tiling="4KiB"))
        with engine:
            hidden = engine(tokens)
            engine.backward(trainer_client.chunked_cross_entropy(hidden, model.head, tokens, tokens=5))
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(engine.get_full(name, "grad"), parameter.grad, rtol=1e-4, atol=1e-6)
            engine.step()

    assert max(seen) <= 2


def test_a_chunked_loss_within_gathered_computes_with_a_changed_weight(model_store: str, job: str) -> None:
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(2))
    model = Shared()
    engine = start(model, config_of(model_store, job, "nvme", tiling="4KiB"))
    with engine, torch.no_grad():
        hidden = engine(tokens)
        with engine.gathered(model.head, modifier_rank=0):
            before = torch.nn.functional.cross_entropy(model.head(hidden).flatten(0, 1), tokens.flatten())
            model.head.weight.mul_(8)
            changed = trainer_client.chunked_cross_entropy(hidden, model.head, tokens, tokens=5)
            expected = torch.nn.functional.cross_entropy(model.head(hidden).flatten(0, 1), tokens.flatten())
        torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-6)
        assert abs(float(changed - before)) > 0.1


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_a_whole_weight_within_gathered_are_those_of_the_plain_model(
    model_store: str, job: str, world_size: int
) -> None:
    run_ranks("tests.integration.support.whole_weight_ranks", world_size, model_store, job)


def test_a_backward_through_a_whole_weight_after_gathered_is_refused(model_store: str, job: str) -> None:
    """The values that the backward needs are gone, so its gradients would be NaN."""
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(2))
    model = Shared()
    engine = start(model, config_of(model_store, job, "nvme", tiling="4KiB"))
    with engine:
        with engine.gathered([model.head.weight]):
            penalty = model.head.weight.square().mean()
        loss = engine(tokens).square().mean() + penalty
        with pytest.raises(TiledParameterError, match=r"head\.weight was given to a backward pass.*tiling\.exclude"):
            engine.backward(loss)
        assert model.head.weight.grad is None
