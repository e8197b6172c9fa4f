"""The rows of docs/torch-contract.md as loops, each of which runs in plain PyTorch and with an engine.

A case is a function of a loop. It yields what has to be the same in both, and raises where the engine refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch as safetensors
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_client import Engine

STEPS = 3
Case = Callable[["Loop"], Iterable[Any]]
CASES: dict[str, Case] = {}


def row(text: str) -> Callable[[Case], Case]:
    """Register a case for the row of the page with this text in its first column."""

    def register(case: Case) -> Case:
        assert text not in CASES, text
        CASES[text] = case
        return case

    return register


class Model(nn.Module):
    """A model with units, a weight of its own, a frozen layer and an embedding."""

    def __init__(self, max_norm: float | None = None, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, max_norm=max_norm)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.average = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.inside: Callable[[nn.Module], None] | None = None
        if is_tied:
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embedding.weight

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the modules make of tokens, without a weight of the model itself."""
        hidden: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden

    def encode_scaled(self, tokens: torch.Tensor) -> torch.Tensor:
        scale = self.scale * 1.0
        return self.encode(tokens) * scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens) * self.scale
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        if self.inside is not None:
            self.inside(self)
        return (hidden - self.average(hidden)).square().mean()


class Loop:
    """A training loop over a model, in plain PyTorch or with an engine.

    Attributes:
        model: the script's model.
        optimizer: the optimizer that the loop steps.
        engine: the engine; None in plain PyTorch.
    """

    def __init__(self, begin: Callable[[nn.Module, AdamW], Engine] | None) -> None:
        self._begin = begin
        self.engine: Engine | None = None
        self.build()

    def build(self, **arguments: Any) -> None:
        """Build the model anew, with other arguments, before the loop begins."""
        torch.manual_seed(0)
        self.model: Any = Model(**arguments)
        self.optimizer: Any = AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05, fused=True)

    def start(self) -> None:
        """Begin the training. Cases may build another model, or prepare it, before."""
        if self._begin is not None and self.engine is None:
            self.engine = self._begin(self.model, self.optimizer)
            self.optimizer = self.engine.optimizer

    def call(self, method: str = "__call__", step: int = 0) -> torch.Tensor:
        """Call the model, or a method of it, through the engine if there is one."""
        self.start()
        tokens = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(step))
        output: torch.Tensor = getattr(self.engine or self.model, method)(tokens)
        return output

    def loss(self, step: int = 0) -> torch.Tensor:
        return self.call(step=step)

    def backward(self, step: int = 0) -> torch.Tensor:
        loss = self.loss(step)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: Iterable[int], *, before: Any = None, after: Any = None) -> Iterator[torch.Tensor]:
        """Make steps, and yield their losses. `before` and `after` are called with the model around `step`."""
        for step in steps:
            yield self.backward(step)
            if before is not None:
                before(self.model)
            self.step()
            if after is not None:
                after(self.model)

    def gathered(self, parameters: Any, **arguments: Any) -> AbstractContextManager[None]:
        self.start()
        return nullcontext() if self.engine is None else self.engine.gathered(parameters, **arguments)

    def weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = (
            self.model.state_dict() if self.engine is None else self.engine.full_state_dict()
        )
        return weights


# --- weights that are changed in place


@row("clamps weights after each step (`p.clamp_()` under `no_grad`)")
def clamp(loop: Loop) -> Iterator[Any]:
    @torch.no_grad()
    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)

    yield from loop.train(range(STEPS), after=change)


@row("changes `p.data` in place after each step")
def clamp_data(loop: Loop) -> Iterator[Any]:
    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    yield from loop.train(range(STEPS), after=change)


@row("writes to `p.detach().numpy()` after each step")
def write_by_numpy(loop: Loop) -> Iterator[Any]:
    def change(model: nn.Module) -> None:
        model.get_parameter("blocks.0.weight").detach().numpy()[2] = 0.5

    yield from loop.train(range(STEPS), after=change)


@row("calls `vector_to_parameters` after each step")
def set_vector(loop: Loop) -> Iterator[Any]:
    def change(model: nn.Module) -> None:
        vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())

    yield from loop.train(range(STEPS), after=change)


@row("assigns to `p.data` (averages of weights in the model: MoCo, BYOL, DINO)")
def average(loop: Loop) -> Iterator[Any]:
    def change(model: Any) -> None:
        for ours, theirs in zip(model.average.parameters(), model.blocks[0].parameters(), strict=True):
            ours.data = ours.data * 0.9 + theirs.data * 0.1

    yield from loop.train(range(STEPS), after=change)


@row("masks weights between backward and step")
def mask(loop: Loop) -> Iterator[Any]:
    def change(model: Any) -> None:
        model.blocks[1].weight.data.mul_(torch.arange(64).view(8, 8) % 3 > 0)

    yield from loop.train(range(STEPS), before=change)


@row("changes a weight in its forward (a first batch that sets scales)")
def first_batch(loop: Loop) -> Iterator[Any]:
    def change(model: Any) -> None:
        model.scale.data.fill_(0.5)
        model.inside = None

    loop.model.inside = change
    yield from loop.train(range(STEPS))


@row("has an `Embedding` with `max_norm`")
def renormalize(loop: Loop) -> Iterator[Any]:
    loop.build(max_norm=1.0)
    yield from loop.train(range(STEPS))


@row("changes weights within `engine.gathered(modifier_rank=0)`")
def change_gathered(loop: Loop) -> Iterator[Any]:
    def change(model: Any) -> None:
        with loop.gathered(model, modifier_rank=0), torch.no_grad():
            model.blocks[0].weight.clamp_(-0.1, 0.1)

    yield from loop.train(range(STEPS), after=change)


@row("changes weights within `engine.gathered()`")
def change_read(loop: Loop) -> Iterator[Any]:
    def change(model: Any) -> None:
        with loop.gathered(model):
            model.blocks[0].weight.data.clamp_(-0.1, 0.1)

    yield from loop.train(range(STEPS), after=change)


@row("changes a weight in a hook of its gradient (an optimizer in the backward pass)")
def change_in_hook(loop: Loop) -> Iterator[Any]:
    def change(parameter: torch.Tensor) -> None:
        parameter.data.mul_(0.9)

    loop.model.blocks[0].weight.register_post_accumulate_grad_hook(change)
    yield from loop.train(range(STEPS))


@row("gives a weight another shape or dtype by `p.data = ...`")
def change_kind(loop: Loop) -> Iterator[Any]:
    yield loop.backward()
    loop.step()
    with loop.gathered([loop.model.scale]):
        loop.model.scale.data = torch.ones(1)
        yield loop.backward()
    loop.step()


@row("calls `model.load_state_dict()`")
def load(loop: Loop) -> Iterator[Any]:
    yield from loop.train(range(1))
    loop.model.load_state_dict({"scale": torch.full((8,), 0.5)}, strict=False)
    yield from loop.train(range(STEPS))


# --- hooks, gradients of outputs, and other methods


@row("registers hooks after `initialize` that look at `p.grad` (`register_post_accumulate_grad_hook`)")
def look_at_gradients(loop: Loop) -> Iterator[Any]:
    seen: list[torch.Tensor] = []

    def look(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    loop.start()
    loop.model.blocks[1].bias.register_post_accumulate_grad_hook(look)
    yield from loop.train(range(STEPS))
    yield from seen
    yield len(seen)


@row("registers hooks after `initialize` that change a gradient (`p.register_hook`, a mask)")
def change_gradients(loop: Loop) -> Iterator[Any]:
    loop.start()
    loop.model.blocks[0].weight.register_hook(lambda gradient: gradient * (torch.arange(8) % 2))
    yield from loop.train(range(STEPS))


@row("registers forward hooks after `initialize` that read weights")
def read_in_hooks(loop: Loop) -> Iterator[Any]:
    seen: list[torch.Tensor] = []
    loop.start()
    for module in (loop.model.blocks[0], loop.model):
        module.register_forward_hook(lambda module, *_: seen.append(next(module.parameters()).detach().norm()))
    yield from loop.train(range(STEPS))
    yield from seen


@row("calls `torch.autograd.grad(loss, p, retain_graph=True)` before `backward`")
def gradients_of_outputs(loop: Loop) -> Iterator[Any]:
    for step in range(STEPS):
        loss = loop.loss(step)
        (gradient,) = torch.autograd.grad(loss, loop.model.blocks[1].weight, retain_graph=True)
        yield gradient.norm()
        (loss * gradient.norm().detach()).backward()
        loop.step()


@row("calls a method besides `forward` that calls modules")
def other_method(loop: Loop) -> Iterator[Any]:
    for step in range(STEPS):
        loss = loop.call("encode", step).square().mean()
        yield loss.detach()
        loss.backward()
        loop.step()


@row("calls a method besides `forward` that begins with a weight of its own")
def other_method_of_root(loop: Loop) -> Iterator[Any]:
    for step in range(STEPS):
        loss = loop.call("encode_scaled", step).square().mean()
        yield loss.detach()
        loss.backward()
        loop.step()


@row("uses weights in the loss, outside of the forward (a penalty)")
def penalty(loop: Loop) -> Iterator[Any]:
    for step in range(STEPS):
        loss = loop.loss(step) + sum(p.square().sum() for p in loop.model.parameters())
        yield loss.detach()
        loss.backward()
        loop.step()


# --- gradients and the optimizer's states


def between(text: str, change: Callable[[Loop], Any], *, after: bool = False) -> None:
    """Register a case that makes a change between backward and step, or after the step."""

    @row(text)
    def case(loop: Loop) -> Iterator[Any]:
        def act(_: nn.Module) -> None:
            change(loop)

        yield from loop.train(range(STEPS), **{"after" if after else "before": act})


def scaled_step(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(loop.optimizer)


def read_gradient(loop: Loop) -> torch.Tensor:
    norm: torch.Tensor = loop.model.blocks[0].weight.grad.norm()
    return norm


def assign_gradient(loop: Loop) -> None:
    loop.model.blocks[0].weight.grad = torch.zeros(8, 8)


def set_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.5


def move_to_new_group(loop: Loop) -> None:
    groups = loop.optimizer.param_groups
    if len(groups) == 1:
        moved = groups[0]["params"].pop()
        loop.optimizer.add_param_group({"params": [moved], "lr": 0.01})


def freeze(loop: Loop) -> None:
    loop.model.blocks[0].requires_grad_(not loop.model.blocks[0].weight.requires_grad)


def assign_state(loop: Loop) -> None:
    loop.optimizer.state[loop.model.blocks[0].weight] = {}


@row("calls `model.zero_grad()` to drop the gradients of another loss, and then `backward`")
def drop_another_loss(loop: Loop) -> Iterator[Any]:
    for step in range(STEPS):
        loop.backward(step + STEPS)
        loop.model.zero_grad()
        yield loop.backward(step)
        loop.step()


utils = torch.nn.utils
between("calls `torch.nn.utils.clip_grad_norm_`", lambda loop: utils.clip_grad_norm_(loop.model.parameters(), 0.1))
between("calls `torch.nn.utils.clip_grad_value_`", lambda loop: utils.clip_grad_value_(loop.model.parameters(), 0.1))
between(
    "calls `torch.nn.utils.get_total_norm`",
    lambda loop: utils.get_total_norm([p.grad for p in loop.model.parameters() if p.grad is not None]),
)
between("reads `p.grad` between backward and step", read_gradient)
between("assigns to `p.grad` between backward and step", assign_gradient)
between("calls `p.grad.zero_()`", lambda loop: loop.model.blocks[0].weight.grad.zero_())
between(
    "calls `zero_grad()` of a module in the model between backward and step",
    lambda loop: loop.model.blocks[0].zero_grad(),
)
between("calls `model.zero_grad()` after the step", lambda loop: loop.model.zero_grad(), after=True)
between("steps by `torch.amp.GradScaler`", scaled_step)
between("calls `optimizer.state.clear()`", lambda loop: loop.optimizer.state.clear(), after=True)
between("assigns to `optimizer.state[p]`", assign_state, after=True)
between(
    'reads `optimizer.state[p]["exp_avg"]`',
    lambda loop: loop.optimizer.state[loop.model.blocks[0].weight]["exp_avg"],
    after=True,
)
between(
    "calls `optimizer.load_state_dict()`",
    lambda loop: loop.optimizer.load_state_dict({"state": {}, "param_groups": []}),
    after=True,
)
between("calls `optimizer.state_dict()`", lambda loop: loop.optimizer.state_dict(), after=True)
between('sets `optimizer.param_groups[0]["lr"]`', set_rate, after=True)
between("moves a parameter to a new group by `optimizer.param_groups`", move_to_new_group, after=True)
between("calls `requires_grad_()` between steps", freeze, after=True)
between("calls `model.half()`", lambda loop: loop.model.half(), after=True)


@row("copies the model by `copy.deepcopy`")
def copy_model(loop: Loop) -> Iterator[Any]:
    yield loop.backward()
    copied = copy.deepcopy(loop.model)
    assert all(type(p) is nn.Parameter and p.grad is None for p in copied.parameters()) or loop.engine is None
    yield copied.blocks[0].weight.detach().norm()
    loop.step()
    yield from loop.train(range(STEPS))


# --- models that are saved by other means than the engine's


def saving(text: str, save_and_load: Callable[[Any, Path], nn.Module]) -> None:
    """Register two cases, in which a tied model is saved in the midst of the training, gathered first or not."""

    def case(loop: Loop, *, is_gathered: bool) -> Iterator[Any]:
        loop.build(is_tied=True)
        yield from loop.train(range(STEPS))
        yield loop.backward()
        with TemporaryDirectory() as folder, loop.gathered(loop.model) if is_gathered else nullcontext():
            loaded: Any = save_and_load(loop.model, Path(folder))
        assert loaded.head.weight is loaded.embedding.weight
        assert not [name for each in loaded.modules() for name in vars(each) if name in ("__reduce_ex__", "_apply")]
        loop.step()
        yield from loop.train(range(STEPS))
        yield from (parameter.detach() for parameter in loaded.parameters())
        loss = loaded(torch.zeros(4, 5, dtype=torch.int64))
        loss.backward()
        yield loss.detach()

    row(text)(partial(case, is_gathered=False))
    row(f"{text} within `engine.gathered(model)`")(partial(case, is_gathered=True))


def by_torch(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model, folder / "model.pt")
    loaded: nn.Module = torch.load(folder / "model.pt", weights_only=False)
    return loaded


def by_safetensors(model: nn.Module, folder: Path) -> nn.Module:
    safetensors.save_model(model, str(folder / "model.safetensors"))
    loaded = Model(is_tied=True)
    safetensors.load_model(loaded, folder / "model.safetensors")
    return loaded


def by_state_dict(model: nn.Module, folder: Path) -> nn.Module:
    torch.save({name: value for name, value in model.state_dict().items() if "embed" in name}, folder / "part.pt")
    # The file has one matrix [12, 8] in fp32, and no other parameter of its flat group.
    assert (folder / "part.pt").stat().st_size < 12 * 8 * 4 + 2048
    torch.save(model.state_dict(), folder / "all.pt")
    loaded = Model(is_tied=True)
    loaded.load_state_dict(torch.load(folder / "all.pt"))
    return loaded


saving("saves the model by `torch.save(model)`", by_torch)
saving("saves a tied model by `safetensors.torch.save_model`", by_safetensors)
saving("saves a part of `model.state_dict()`", by_state_dict)


@row("saves the engine by `torch.save(engine)`")
def save_engine(loop: Loop) -> Iterator[Any]:
    yield loop.backward()
    torch.save(loop.engine or loop.model, BytesIO())


@row("calls `save_pretrained` of a model of transformers")
def save_pretrained(loop: Loop) -> Iterator[Any]:
    loop.model = Pretrained()
    loop.optimizer = AdamW(loop.model.parameters(), lr=0.05, fused=True)
    yield from loop.train(range(STEPS))
    with TemporaryDirectory() as folder:
        loop.model.save_pretrained(folder)
        yield from Pretrained.from_pretrained(folder).parameters()
    yield from loop.train(range(STEPS))


class Pretrained(GPT2LMHeadModel):
    """A model of transformers with tied weights, which returns its loss."""

    def __init__(self, config: GPT2Config | None = None) -> None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 12, "n_positions": 8}
        silent: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
        silent |= {"bos_token_id": None, "eos_token_id": None}
        super().__init__(config or GPT2Config(**sizes, **silent))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(input_ids=tokens, labels=tokens).loss
        return loss


# --- compiled models


@row("passes `torch.compile(model)` to `initialize`")
def compile_model(loop: Loop) -> Iterator[Any]:
    loop.model = torch.compile(loop.model, backend="eager")
    yield loop.backward()


@row("calls `compile()` of each block before `initialize`")
def compile_blocks(loop: Loop) -> Iterator[Any]:
    for block in loop.model.blocks:
        block.compile(backend="eager")
    yield from loop.train(range(STEPS))
