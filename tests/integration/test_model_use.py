"""Uses of a model besides plain training steps: calls of its parts, several passes, errors, compiled units, two
engines."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integration.support.model_runs import build, config_of, optimizer_of, start
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import micro_batches
from tests.integration.support.zoo import WIDTH, ZOO, Block, Borrower, Checkpointed, Language
from trainer_client import ConfigError, Engine, initialize
from trainer_client.errors import PhaseError, ReleasedParameterError
from trainer_client.training.model.released import ReleasedParameter

BATCHES = list(micro_batches(4))
pytestmark = [
    # torch warns about the inputs of reentrant checkpointing under no_grad, and about its own compiler.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Plain:
    """A plain model with the engine's methods."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self._optimizer = optimizer_of(model)

    def __call__(self, **batch: torch.Tensor) -> Any:
        return self.module(**batch)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.module.state_dict())


def both_ways(
    model: nn.Module, act: Callable[[Any], Iterator[torch.Tensor]], address: str, job: str, **section: Any
) -> None:
    """Assert that `act` yields the same numbers with an engine as with the plain model, and that the final weights are
    equal."""
    plain = Plain(copy.deepcopy(model))
    expected = [value.detach().clone() for value in act(plain)]
    with start(model, config_of(address, job, **section)) as engine:
        actual = [value.detach().clone() for value in act(engine)]
        weights = engine.full_state_dict()
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * len(expected)
    assert [name for name, value in plain.full_state_dict().items() if not torch.equal(value, weights[name])] == []


def train(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return loss


def gathered_blocks(blocks: nn.ModuleList) -> int:
    return sum(not isinstance(next(block.parameters()), ReleasedParameter) for block in blocks)


def test_parts_of_a_model_are_called_by_themselves(model_store: str) -> None:
    """A caller may call a part alone, as T5's generate() calls the encoder: also with gradients, and between a forward
    and its backward."""

    def act(engine: Any) -> Iterator[torch.Tensor]:
        model, batch = engine.module, BATCHES[0]
        yield train(engine, batch)
        with torch.no_grad():
            yield model.get_encoder()(batch).last_hidden_state
        yield model.eval().generate(batch[:, :5], max_new_tokens=4, do_sample=False)
        loss = model.train()(input_ids=batch, labels=batch).loss
        with torch.inference_mode():
            yield model.get_encoder()(batch).last_hidden_state.clone()
        engine.backward(loss + model.get_encoder()(batch).last_hidden_state.mean() + model.shared(batch).mean())
        engine.step()

    both_ways(build("t5"), act, model_store, "parts")


def test_several_forwards_and_backward_passes_make_one_step(model_store: str) -> None:
    def act(engine: Any) -> Iterator[torch.Tensor]:
        first, second, third = BATCHES[:3]
        for _ in range(2):
            one = engine(input_ids=first, labels=first).loss
            two = engine(input_ids=second, labels=second).loss
            engine.backward(one)
            engine.backward(two)
            both = engine(input_ids=first, labels=first).loss + engine(input_ids=third, labels=third).loss
            engine.backward(both, retain_graph=True)
            engine.backward(both)
            # No backward pass uses this graph.
            engine(input_ids=third, labels=third)
            engine.step()
            yield from (one, two, both)

    both_ways(build("gpt2-zoo"), act, model_store, "passes")
    both_ways(build("external"), act, model_store, "passes-external")


class Faulty(Language):
    """A model of which a block raises when `forwards_until_failure` reaches 0, in a forward or in its recomputation."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.reentrant = reentrant
        self.forwards_until_failure = -1

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            run = self._run if self.reentrant is None else self._recomputed
            hidden = run(block, hidden)
        return hidden

    def _recomputed(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        recomputed: torch.Tensor = checkpoint(self._run, block, hidden, use_reentrant=self.reentrant)
        return recomputed

    def _run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        self.forwards_until_failure -= 1
        if self.forwards_until_failure == 0:
            raise ArithmeticError("as told")
        return block(hidden)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_forward_that_raises_leaves_the_engine_usable(model_store: str, reentrant: bool | None) -> None:
    def act(engine: Any) -> Iterator[torch.Tensor]:
        model, batch = engine.module, BATCHES[0]
        for grad in (True, False, True):
            model.forwards_until_failure = 3
            with torch.set_grad_enabled(grad), pytest.raises(ArithmeticError):
                engine(input_ids=batch, labels=batch)
            yield train(engine, batch)

    both_ways(Faulty(reentrant), act, model_store, f"raises-{reentrant}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_that_raises_ends_the_run_and_says_so(model_store: str, reentrant: bool) -> None:
    model = Faulty(reentrant)
    with start(model, config_of(model_store, f"recomputation-{reentrant}")) as engine:
        batch = BATCHES[0]
        loss = engine(input_ids=batch, labels=batch).loss
        model.forwards_until_failure = 2
        with pytest.raises(ArithmeticError):
            engine.backward(loss)
        for call in (engine.step, lambda: engine(input_ids=batch), lambda: model(input_ids=batch, labels=batch)):
            with pytest.raises(PhaseError, match="restart the job"):
                call()
        assert gathered_blocks(model.blocks) == 0


def test_a_released_parameter_shows_what_it_is_and_not_what_it_holds(model_store: str) -> None:
    model = build("gpt2-zoo")
    weight = model.transformer.h[1].mlp.c_fc.weight
    shape = weight.shape
    with start(model, config_of(model_store, "released")) as engine:
        train(engine, BATCHES[0])
        assert (weight.shape, weight.requires_grad, weight.grad) == (shape, True, None)
        assert "released" in repr(weight)
        assert f"{weight}" == str(weight) == repr(weight)
        for use in (weight.sum, lambda: weight.data, lambda: weight + 1, weight.detach, lambda: torch.cat([weight])):
            with pytest.raises(ReleasedParameterError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight"):
                use()
        train(engine, BATCHES[1])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.large = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scale * self.large(hidden)


def test_a_small_parameter_can_be_read_and_not_changed_outside_of_a_forward(model_store: str) -> None:
    model = Scaled()
    plain = copy.deepcopy(model)
    section = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 8}
    config = config_of(model_store, "small") | {"zero_optimization": section}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    stored = torch.optim.SGD(model.parameters(), lr=0.1)
    with initialize(model=model, optimizer=stored, config=config)[0] as engine:
        for _ in range(3):
            assert model.scale.item() == plain.scale.item()
            loss = engine(torch.ones(2, 8)).square().mean()
            assert model.scale.tolist() == plain.scale.tolist()
            engine.backward(loss)
            engine.step()
            plain(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert torch.equal(model.scale.exp(), plain.scale.exp())
                assert model.large.bias.tolist() == plain.large.bias.tolist()
        units = [type(parameter).__name__ for parameter in model.parameters()]
        assert units == ["ReleasedParameter"] * 3
        uses: list[Callable[[], Any]] = [
            model.scale.exp,
            lambda: model.scale.data,
            model.scale.detach,
            model.large.weight.sum,
            lambda: nn.init.zeros_(model.scale),
            lambda: torch.no_grad()(model.scale.clamp_)(0.0, 0.5),
            torch.no_grad()(model.large.weight.sum),
        ]
        for use in uses:
            with pytest.raises(ReleasedParameterError, match=r"scale|large\.weight"):
                use()
        assert model.scale.item() == plain.scale.item()
    with pytest.raises(ReleasedParameterError, match="scale"):
        model.scale.item()


def test_one_of_two_ranks_reads_small_parameters_whatever_the_gather(model_store: str) -> None:
    def config(job: str, gather: str, **homes: str) -> dict[str, Any]:
        section = {"stage": 3, **{f"offload_{kind}": {"device": home} for kind, home in homes.items()}}
        return config_of(model_store, job, gather=gather) | {"zero_optimization": section, "gradient_clipping": 0}

    configs = [
        config("small-collective", "collective", param="cpu", optimizer="nvme"),
        config("small-store", "store", param="cpu", optimizer="cpu"),
        config("small-device", "auto", optimizer="cpu"),
        config("small-all-on-device", "collective"),
    ]
    run_ranks("tests.integration.support.small_read_ranks", 2, json.dumps(configs))


class CompiledBorrower(Language):
    def __init__(self) -> None:
        super().__init__()
        self.squares = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
        self.blocks = nn.ModuleList([Borrower() for _ in range(3)])
        self.blocks[0].others.append(self.squares[0])
        self.blocks[2].others.append(self.squares[1])

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.squares[1](hidden)


@pytest.mark.parametrize("compiled", ["model", "units", "units-registered"])
def test_compiled_units_use_external_parameters(model_store: str, compiled: str) -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def act(engine: Any) -> Iterator[torch.Tensor]:
        model = engine.module
        if isinstance(engine, Engine):
            for module in [model] if compiled == "model" else model.blocks:
                module.compile(backend=count)
            if compiled == "units-registered":
                engine.register_external_parameter(model.blocks[0], model.squares[0].weight)
                engine.register_external_parameter(model.blocks[2], model.squares[1].weight)
        for batch in BATCHES[:3]:
            yield train(engine, batch)

    both_ways(CompiledBorrower(), act, model_store, f"compiled-{compiled}")
    assert graphs


def test_a_stranger_is_not_registered(model_store: str) -> None:
    model, stranger = Checkpointed(reentrant=None), nn.Linear(1, 1)
    with start(model, config_of(model_store, "stranger")) as engine:
        for module, parameter in ((model, next(stranger.parameters())), (stranger, next(model.parameters()))):
            with pytest.raises(ConfigError, match=r"is not .*of this engine's model"):
                engine.register_external_parameter(module, parameter)


def test_a_teacher_and_a_student_are_two_engines(model_store: str) -> None:
    teacher_config = config_of(model_store, "teacher")

    def act(engine: Any) -> Iterator[torch.Tensor]:
        torch.manual_seed(5)
        teacher = ZOO["llama"]().eval()
        served = start(teacher, teacher_config) if isinstance(engine, Engine) else Plain(teacher)
        for batch in BATCHES:
            with torch.no_grad():
                target = served(input_ids=batch).logits
            output = engine(input_ids=batch, labels=batch)
            loss = output.loss + nn.functional.mse_loss(output.logits, target)
            engine.backward(loss)
            engine.step()
            yield loss
        if isinstance(served, Engine):
            served.close()

    both_ways(build("gpt2-zoo"), act, model_store, "student")


def test_a_closed_engine_unmaps_the_arena_and_is_freed_with_its_model(model_store: str) -> None:
    gc.collect()
    before = Path("/proc/self/maps").read_text().count("paramserver-arena")
    model = build("gpt2-zoo")
    with start(model, config_of(model_store, "freed")) as engine:
        train(engine, BATCHES[0])
        assert Path("/proc/self/maps").read_text().count("paramserver-arena") > 0

    assert Path("/proc/self/maps").read_text().count("paramserver-arena") == before
    freed = [weakref.ref(model), weakref.ref(engine)]
    del model, engine
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


@pytest.mark.parametrize(("limit", "kept_after_forward"), [(None, 1), (32_000, 2), (1_000_000, 4)])
def test_what_is_used_again_stays_within_the_limit(
    model_store: str, limit: int | None, kept_after_forward: int
) -> None:
    """A block has 9,456 elements and the root 12,336. The root and one block are in use at once; other blocks stay
    gathered if the limit has room for them."""
    model = Faulty(None)
    model.blocks = nn.ModuleList([Block(48) for _ in range(4)])
    model.embedding = nn.Embedding(257, 48)
    config = config_of(model_store, f"limit-{limit}")
    if limit is not None:
        config["zero_optimization"]["stage3_max_live_parameters"] = limit
    most, after = [], []
    with start(model, config) as engine:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: most.append(gathered_blocks(model.blocks)))
        for batch in BATCHES:
            loss = engine(input_ids=batch, labels=batch).loss
            after.append(gathered_blocks(model.blocks))
            engine.backward(loss)
            engine.step()
            assert gathered_blocks(model.blocks) == 0
    assert (max(most), after[-1]) == (kept_after_forward, kept_after_forward)


def test_what_stays_gathered_is_gathered_anew_after_a_change(model_store: str) -> None:
    model, batch = Faulty(None), BATCHES[0]
    config = config_of(model_store, "gathered anew")
    config["zero_optimization"]["stage3_max_live_parameters"] = 1_000_000
    with start(model, config) as engine:
        train(engine, batch)
        with torch.no_grad():
            engine(input_ids=batch, labels=batch)
        assert gathered_blocks(model.blocks) == 4
        engine.set_full("blocks.1.up.weight", "param", torch.ones(2 * WIDTH, WIDTH))
        with engine.gathered(model.blocks[2], modifier_rank=0), torch.no_grad():
            model.blocks[2].up.weight.fill_(2.0)
        with torch.no_grad():
            actual = engine(input_ids=batch, labels=batch).loss
        weights = engine.full_state_dict()

    plain = Faulty(None)
    plain.load_state_dict(weights)
    assert (plain.blocks[1].up.weight.mean(), plain.blocks[2].up.weight.mean()) == (1.0, 2.0)
    assert torch.equal(actual, plain(input_ids=batch, labels=batch).loss)


@pytest.mark.parametrize("model", ["checkpointed", "checkpointed-reentrant", "unchecked"])
def test_a_recomputation_gathers_one_block_besides_the_one_in_backward(model_store: str, model: str) -> None:
    """At most two blocks are gathered, also where several blocks are recomputed before the first of them goes
    backward."""
    module = build(model)
    assert isinstance(module, Checkpointed)
    most = []

    def count(*_: Any) -> None:
        most.append(gathered_blocks(module.blocks))

    with start(module, config_of(model_store, f"recomputed-{model}")) as engine:
        for block in module.blocks:
            block.register_forward_pre_hook(count)
            block.up.register_full_backward_hook(count)
        for batch in BATCHES[:2]:
            train(engine, batch)
    assert max(most) <= (1 if model == "unchecked" else 2)
