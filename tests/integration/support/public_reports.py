"""Reports of users of DeepSpeed and of libraries over it, as loops that also run in plain PyTorch.

Each report has its source and what its author did. Its case is a function of a loop, as in contract_cases.py: it yields
what has to be the same in plain PyTorch and with an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from tests.integration.support.contract_cases import STEPS, Case, Loop, Pretrained

TOKENS = 12
WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        source: the address of the report.
        did: what its author did.
        case: the loop.
    """

    source: str
    did: str
    case: Case


REPORTS: list[Report] = []


def report(source: str, did: str) -> Callable[[Case], Case]:
    """Register a case for a report; `source` is owner/repository#number of GitHub."""
    repository, _, number = source.partition("#")

    def register(case: Case) -> Case:
        REPORTS.append(Report(source=f"https://github.com/{repository}/issues/{number}", did=did, case=case))
        return case

    return register


def hidden(tokens: torch.Tensor) -> torch.Tensor:
    """Return inputs [4, 5, WIDTH] for models without an embedding, which need no gradient."""
    return functional.one_hot(tokens % WIDTH, WIDTH).float()


class Tower(nn.Module):
    """Layers after one another; what a report is about is a subclass's."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.run(hidden(tokens)).square().mean()


def use(loop: Loop, make: Callable[[], nn.Module], *, groups: Callable[[Any], Any] | None = None) -> Any:
    """Give the loop another model, with the same values in each call, and an optimizer of it; return the model."""
    torch.manual_seed(1)
    loop.model = make()
    trained = [parameter for parameter in loop.model.parameters() if parameter.requires_grad]
    loop.optimizer = AdamW(trained if groups is None else groups(loop.model), lr=0.05, fused=True)
    return loop.model


def trained(loop: Loop, make: Callable[[], nn.Module]) -> Iterator[Any]:
    """Train another model."""
    use(loop, make)
    yield from loop.train(range(STEPS))


# --- graphs and passes


@report("deepspeedai/DeepSpeed#3539", "calls backward twice on one loss, the first time with retain_graph")
def backward_twice(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    for step in range(STEPS):
        loss = loop.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        loop.step()
        yield loss.detach()


@report("deepspeedai/DeepSpeed#1227", "uses one layer several times in a forward, as Albert does")
def repeated_layer(loop: Loop) -> Iterator[Any]:
    def make() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        return Tower(layer, nn.Linear(WIDTH, WIDTH), layer, layer)

    yield from trained(loop, make)


@report("deepspeedai/DeepSpeed#966", "ties whole layers, has one that is not used, and compares losses of all stages")
def tied_layers(loop: Loop) -> Iterator[Any]:
    def make() -> nn.Module:
        model: Any = Tower()
        model.layers[2].weight, model.layers[2].bias = model.layers[0].weight, model.layers[0].bias
        model.unused = nn.Linear(WIDTH, WIDTH)
        return model

    yield from trained(loop, make)


class Branching(Tower):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = self.layers[0](hidden(tokens))
        return self.layers[1 if int(tokens.sum()) % 2 else 2](outputs).square().mean()


@report("deepspeedai/DeepSpeed#5070", "sends inputs through one of two networks, as a flag says")
def dynamic_network(loop: Loop) -> Iterator[Any]:
    yield from trained(loop, Branching)


class Skipping(Tower):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = hidden(tokens)
        for number, layer in enumerate(self.layers):
            if (int(tokens[0, 0]) + number) % 3:
                outputs = torch.tanh(layer(outputs))
        return outputs.square().mean()


@report("deepspeedai/DeepSpeed#3156", "searches for an architecture: each step leaves out other layers")
def skipped_layers(loop: Loop) -> Iterator[Any]:
    yield from trained(loop, Skipping)


@report("deepspeedai/DeepSpeed#777", "has parameters that no forward uses, at stage 2")
def unused_parameters(loop: Loop) -> Iterator[Any]:
    class Unused(Tower):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.layers[1](hidden(tokens)).square().mean()

    yield from trained(loop, Unused)


@report("deepspeedai/DeepSpeed#5524", "has submodules whose inputs need no gradient")
def inputs_without_gradient(loop: Loop) -> Iterator[Any]:
    class Parallel(Tower):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.stack([layer(hidden(tokens)) for layer in self.layers]).square().mean()

    yield from trained(loop, Parallel)


@report("deepspeedai/DeepSpeed#7665", "calls output.backward(gradient) of an output that is no scalar")
def output_gradient(loop: Loop) -> Iterator[Any]:
    class Outputs(Tower):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.run(hidden(tokens))

    use(loop, Outputs)
    for step in range(STEPS):
        outputs = loop.call(step=step)
        outputs.backward(outputs.detach().sign())
        loop.step()
        yield outputs.detach()


class Checkpointed(Tower):
    use_reentrant = False

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(checkpoint(layer, inputs, use_reentrant=self.use_reentrant))
        return inputs


@report("huggingface/diffusers#4006", "checkpoints activations at stage 3")
def checkpointed(loop: Loop) -> Iterator[Any]:
    yield from trained(loop, Checkpointed)


@report("huggingface/transformers#23170", "checkpoints activations of frozen layers between trained ones")
def checkpointed_frozen(loop: Loop) -> Iterator[Any]:
    def make() -> nn.Module:
        model = Checkpointed()
        model.layers[1].requires_grad_(False)
        return model

    yield from trained(loop, make)


@report("deepspeedai/DeepSpeed#7913", "has a loss that uses torch.func.grad_and_value")
def functional_loss(loop: Loop) -> Iterator[Any]:
    class Distilling(Tower):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            outputs = self.run(hidden(tokens))
            slope, value = torch.func.grad_and_value(lambda logits: logits.square().mean())(outputs.detach())
            return (outputs * slope).sum() + value

    yield from trained(loop, Distilling)


# --- modes and other forwards


@report("Lightning-AI/pytorch-lightning#19467", "changes to eval() between the forward and its backward")
def backward_in_eval(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    for step in range(STEPS):
        loop.model.train()
        loss = loop.loss(step)
        loop.model.eval()
        loss.backward()
        loop.step()
        yield loss.detach()


@report("deepspeedai/DeepSpeed#4922", "generates under no_grad in train() between steps")
def forward_without_gradient(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    for step in range(STEPS):
        with torch.no_grad():
            yield loop.loss(step + 7)
        yield from loop.train([step])


@report("deepspeedai/DeepSpeed#3068", "evaluates, and trains on")
def evaluate(loop: Loop) -> Iterator[Any]:
    use(loop, Branching)
    for step in range(STEPS):
        yield from loop.train([step])
        loop.model.eval()
        with torch.no_grad():
            for other in range(3):
                yield loop.loss(other)
        loop.model.train()


@report("snowflakedb/ArcticTraining#265", "evaluates under torch.inference_mode between steps")
def inference_mode(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    for step in range(STEPS):
        yield from loop.train([step])
        with torch.inference_mode():
            yield loop.loss(step).item()


# --- kinds of modules and parameters


@report("Lightning-AI/pytorch-lightning#9394", "trains an LSTM")
def recurrent(loop: Loop) -> Iterator[Any]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.lstm(hidden(tokens))[0]
            return outputs.square().mean()

    yield from trained(loop, Recurrent)


@report("deepspeedai/DeepSpeed#8467", "has a layer without outputs, whose weight has no elements")
def without_elements(loop: Loop) -> Iterator[Any]:
    class Empty(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Linear(WIDTH, 0, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            outputs = self.run(hidden(tokens))
            return outputs.square().mean() + self.empty(outputs).sum()

    yield from trained(loop, Empty)
    yield list(loop.model.empty.weight.shape)


@report("deepspeedai/DeepSpeed#1045", "has a layer with weight_norm, as wav2vec2 does")
def weight_norm(loop: Loop) -> Iterator[Any]:
    def make() -> nn.Module:
        return Tower(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH), dim=0), nn.Linear(WIDTH, WIDTH))

    yield from trained(loop, make)


@report("deepspeedai/DeepSpeed#3144", "calls functional.linear with a transposed weight, and the bias as a keyword")
def transposed_weight(loop: Loop) -> Iterator[Any]:
    class Transposed(Tower):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            layer: Any = self.layers[0]
            return functional.linear(hidden(tokens), layer.weight.T, bias=layer.bias).square().mean()

    yield from trained(loop, Transposed)


@report("deepspeedai/DeepSpeed#842", "has weights in a ParameterList and a ParameterDict")
def parameter_lists(loop: Loop) -> Iterator[Any]:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])
            self.named = nn.ParameterDict({"offset": nn.Parameter(torch.zeros(WIDTH))})

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            outputs = hidden(tokens)
            for matrix in self.matrices:
                outputs = torch.tanh(outputs @ matrix + self.named["offset"])
            return outputs.square().mean()

    yield from trained(loop, Lists)


@report("huggingface/transformers#16688", "makes a longer table of positions within the forward, as M2M100 does")
def table_in_forward(loop: Loop) -> Iterator[Any]:
    class Positions(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1, WIDTH), persistent=False)
            self.table: torch.Tensor

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if len(self.table) < tokens.shape[1]:
                self.table = torch.arange(tokens.shape[1] * WIDTH).view(-1, WIDTH) / 40.0
            return self.run(hidden(tokens) + self.table[: tokens.shape[1]]).square().mean()

    yield from trained(loop, Positions)


@report("deepspeedai/DeepSpeed#8009", "attaches a module that is not trained after initialize")
def late_module(loop: Loop) -> Iterator[Any]:
    class Late(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.extra: nn.Module | None = None

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            outputs = self.run(hidden(tokens))
            return (outputs if self.extra is None else self.extra(outputs)).square().mean()

    use(loop, Late)
    yield from loop.train([0])
    torch.manual_seed(5)
    loop.model.extra = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    yield from loop.train([1, 2])
    del loop.model.extra


# --- what is frozen, and groups


@report("deepspeedai/DeepSpeed#4776", "trains the embedding alone")
def embedding_alone(loop: Loop) -> Iterator[Any]:
    def make() -> nn.Module:
        model = Pretrained()
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
        return model

    yield from trained(loop, make)


@report("deepspeedai/DeepSpeed#2615", "puts frozen weights into a group with rate 0")
def frozen_group(loop: Loop) -> Iterator[Any]:
    def make() -> nn.Module:
        model = Tower()
        model.layers[0].requires_grad_(False)
        return model

    def groups(model: Tower) -> list[dict[str, Any]]:
        parts = [[p for p in model.parameters() if p.requires_grad is is_trained] for is_trained in (True, False)]
        return [{"params": parts[0], "lr": 0.05}, {"params": parts[1], "lr": 0.0}]

    use(loop, make, groups=groups)
    yield from loop.train(range(STEPS))


@report("deepspeedai/DeepSpeed#6873", "gives groups other learning rates and decays at stage 3")
def rates_of_groups(loop: Loop) -> Iterator[Any]:
    def groups(model: Tower) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
            {"params": [p for name, p in named if "0.weight" in name], "lr": 0.5},
            {"params": [p for name, p in named if "bias" not in name and "0.weight" not in name]},
        ]

    use(loop, Tower, groups=groups)
    yield from loop.train(range(STEPS))
    yield [group["lr"] for group in loop.optimizer.param_groups]


@report("huggingface/transformers#10330", "asks a schedule of torch for the last rate before the first step")
def schedule(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    loop.start()
    lr_scheduler = LambdaLR(loop.optimizer, lambda step: min(1.0, (step + 1) / 3))
    for step in range(STEPS + 2):
        yield lr_scheduler.get_last_lr()[0]
        yield from loop.train([step])
        lr_scheduler.step()


# --- what scripts look at


@report("deepspeedai/DeepSpeed#4064", "counts the elements of the parameters at stage 3")
def count_elements(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    yield from loop.train(range(1))
    yield sum(parameter.numel() for parameter in loop.model.parameters())
    yield [list(parameter.shape) for parameter in loop.model.parameters() if parameter.dim() == 2]


@report("huggingface/transformers#32021", "asks for the size of the input embedding at stage 3")
def size_of_embedding(loop: Loop) -> Iterator[Any]:
    use(loop, Pretrained)
    yield from loop.train(range(1))
    yield list(loop.model.get_input_embeddings().weight.shape)
    yield loop.model.get_input_embeddings().weight.size(0)


@report("huggingface/transformers#24860", "compares a weight with a copy of it from the beginning")
def monitor(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    copies = []
    for step in range(STEPS):
        with loop.gathered([loop.model.layers[0].weight]):
            copies.append(loop.model.layers[0].weight.detach().clone())
        yield from loop.train([step])
    yield from copies
    yield torch.equal(copies[0], copies[-1])


@report("deepspeedai/DeepSpeed#7464", "uses a norm of weights in the loss, as the answer to the report says")
def weights_in_loss(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    for step in range(STEPS):
        with loop.gathered(loop.model):
            loss = loop.loss(step) + loop.model.layers[0].weight.norm()
            loss.backward()
        loop.step()
        yield loss.detach()


@report("deepspeedai/DeepSpeed#5199", "looks at gradients between backward and step")
def gradients(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    for step in range(STEPS):
        yield loop.backward(step)
        for name, parameter in loop.model.named_parameters():
            yield parameter.grad if loop.engine is None else loop.engine.get_full(name, "grad")
        loop.step()


@report("huggingface/accelerate#3807", "clips the norm of the gradient, and finds larger norms in the log")
def clipped(loop: Loop) -> Iterator[Any]:
    use(loop, Tower)
    for step in range(STEPS):
        yield loop.backward(step)
        if loop.engine is None:
            yield nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01) > 0.01
        else:
            yield loop.engine.clip_grad_norm_(0.01) > 0.01
        loop.step()


@report("deepspeedai/DeepSpeed#4534", "loads weights of its own into the model before initialize")
def loaded_before(loop: Loop) -> Iterator[Any]:
    model = use(loop, Tower)
    values: Iterable[tuple[str, torch.Tensor]] = model.state_dict().items()
    model.load_state_dict({name: torch.full_like(value, 0.25) for name, value in values})
    yield from loop.train(range(STEPS))
