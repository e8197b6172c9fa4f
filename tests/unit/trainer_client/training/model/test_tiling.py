"""Layers that compute with tiles compute what whole layers compute, and a large vocabulary's loss makes no logits."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from trainer_client import chunked_cross_entropy
from trainer_client.errors import ConfigError
from trainer_client.training.model.causal_loss import CausalLoss
from trainer_client.training.model.tile import TileWeight
from trainer_client.training.model.tiled_layers import TiledLayer, tiled_layer_of, why_not
from trainer_client.training.model.tiling import cut_rows

# In fp32 sums over features or tokens in another order differ by some units in the last place of the largest term.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def tiled(module: nn.Module, rows: int) -> list[TileWeight]:
    """Have the module compute with tiles of so many rows, which are gathered for good, and return them."""
    whole: Any = module.weight
    weights = [TileWeight(whole, first, min(first + rows, len(whole))) for first in range(0, len(whole), rows)]
    for weight in weights:
        weight.parameter.data = whole.detach()[weight.rows].clone()
    TiledLayer(module, "weight", weights).install()
    return weights


def gradient_of(weights: list[TileWeight]) -> torch.Tensor:
    return torch.cat([weight.parameter.grad for weight in weights if weight.parameter.grad is not None])


@pytest.mark.parametrize(
    ("rows", "row_numel", "most", "bounds"),
    [
        (10, 16, 4, [(0, 4), (4, 8), (8, 10)]),
        (10, 16, 100, [(0, 10)]),
        # 16 elements are two rows here, so a tile has an even number of rows, and never none.
        (9, 8, 3, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]),
        (20, 3, 1, [(0, 16), (16, 20)]),
    ],
)
def test_tiles_are_even_and_begin_at_multiples_of_16_elements(
    rows: int, row_numel: int, most: int, bounds: list[tuple[int, int]]
) -> None:
    assert cut_rows(rows, row_numel, most) == bounds


@pytest.mark.parametrize("bias", [True, False])
def test_a_tiled_linear_equals_the_whole_one_to_rounding(bias: bool) -> None:
    torch.manual_seed(1)
    whole = nn.Linear(24, 50, bias=bias)
    parts = nn.Linear(24, 50, bias=bias)
    parts.load_state_dict(whole.state_dict())
    weights = tiled(parts, 16)
    inputs = [torch.randn(3, 5, 24, requires_grad=True) for _ in range(2)]
    inputs[1].data = inputs[0].data

    outputs = [whole(inputs[0]), parts(inputs[1])]
    for output in outputs:
        output.square().sum().backward()

    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **CLOSE)
    torch.testing.assert_close(gradient_of(weights), whole.weight.grad, **CLOSE)
    if bias:
        torch.testing.assert_close(parts.bias.grad, whole.bias.grad, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiled_conv1d_equals_the_whole_one_to_one_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    whole = Conv1D(50, 24).to(dtype)
    parts = Conv1D(50, 24).to(dtype)
    parts.load_state_dict(whole.state_dict())
    weights = tiled(parts, 8)
    inputs = [torch.randn(3, 5, 24, dtype=dtype).requires_grad_() for _ in range(2)]
    inputs[1].data = inputs[0].data

    outputs = [whole(inputs[0]), parts(inputs[1])]
    for output in outputs:
        output.sum().backward()

    # Each tile's product, and the sum of them, are rounded once.
    bound = CLOSE if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2**-8}
    torch.testing.assert_close(outputs[1], outputs[0], **bound)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **bound)
    torch.testing.assert_close(gradient_of(weights), whole.weight.grad, **bound)


class Kept:
    """The tensors that autograd keeps for the backward, within a `with` block."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor)
        return tensor

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__()

    def memories(self, dtype: torch.dtype) -> set[int]:
        """Return the addresses of the kept memory with elements of that type."""
        return {tensor.untyped_storage().data_ptr() for tensor in self.tensors if tensor.dtype is dtype}


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "conv1d"])
def test_under_autocast_tiles_keep_one_cast_input_and_no_cast_weight(kind: str, input_dtype: torch.dtype) -> None:
    torch.manual_seed(1)

    def build() -> nn.Module:
        return Conv1D(50, 48) if kind == "conv1d" else nn.Linear(48, 50, bias=kind == "linear")

    whole, parts = build(), build()
    parts.load_state_dict(whole.state_dict())
    weights = tiled(parts, 16)
    inputs = [torch.randn(3, 5, 48, dtype=input_dtype, requires_grad=True) for _ in range(2)]
    inputs[1].data = inputs[0].data
    outputs = []
    with Kept() as kept:
        for module, input in zip((whole, parts), inputs, strict=True):
            kept.tensors.clear()
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(module(input))
    # Each tile of a Conv1D has a part of the input for itself.
    cast_inputs = len(weights) if kind == "conv1d" and input_dtype is torch.float32 else 1
    assert len(kept.memories(torch.bfloat16)) == cast_inputs
    for output in outputs:
        output.float().square().sum().backward()

    assert outputs[1].dtype is outputs[0].dtype is torch.bfloat16
    bound: dict[str, Any] = {"rtol": 2**-6, "atol": 2**-5}
    torch.testing.assert_close(outputs[1], outputs[0], **bound)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **bound)
    torch.testing.assert_close(gradient_of(weights), whole.weight.grad, **bound)
    assert gradient_of(weights).dtype is torch.float32
    if kind != "linear without bias":
        torch.testing.assert_close(parts.bias.grad, whole.bias.grad, **bound)


def test_under_autocast_a_tiled_linear_can_be_differentiated_twice() -> None:
    torch.manual_seed(1)
    parts = nn.Linear(24, 50)
    tiled(parts, 16)
    input = torch.randn(4, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (first,) = torch.autograd.grad(parts(input).float().square().sum(), input, create_graph=True)
    first.square().sum().backward()
    assert input.grad is not None and input.grad.isfinite().all() and input.grad.any()


@pytest.mark.parametrize("padding", [None, 0, 17])
def test_a_tiled_embedding_has_the_bits_of_the_whole_one(padding: int | None) -> None:
    torch.manual_seed(1)
    whole = nn.Embedding(50, 16, padding_idx=padding)
    parts = nn.Embedding(50, 16, padding_idx=padding)
    parts.load_state_dict(whole.state_dict())
    weights = tiled(parts, 8)
    tokens = torch.randint(0, 50, (4, 30))
    scale = torch.randn(4, 30, 16)

    outputs = [whole(tokens), parts(tokens)]
    for output in outputs:
        (output * scale).sum().backward()

    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(gradient_of(weights), whole.weight.grad)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="50 rows"):
        parts(tokens + 50)


@pytest.mark.parametrize(
    ("layer", "name", "inputs"),
    [
        (nn.Linear(24, 50), "input", torch.ones(3, 24)),
        (Conv1D(50, 24), "x", torch.ones(3, 24)),
        (nn.Embedding(50, 24), "input", torch.arange(50)),
    ],
)
def test_the_argument_of_a_tiled_layer_has_the_name_that_it_has_in_the_class(
    layer: nn.Module, name: str, inputs: torch.Tensor
) -> None:
    expected = layer(**{name: inputs})
    tiled(layer, 16)

    torch.testing.assert_close(layer(**{name: inputs}), expected, **CLOSE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        layer(unknown=inputs)


def test_a_copy_of_a_tiled_layer_computes_with_a_weight_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(24, 50, bias=False))
    weights = tiled(model[0], 16)

    copied: Any = copy.deepcopy(model)
    copied[0].weight.data.fill_(2.0)
    output = copied(torch.ones(3, 24))
    output.sum().backward()

    assert torch.equal(output, torch.full((3, 50), 48.0))
    assert torch.equal(copied[0].weight.grad, torch.full((50, 24), 3.0))
    assert all(weight.parameter.grad is None for weight in weights)
    assert tiled_layer_of(copied[0]) is None and tiled_layer_of(model[0]) is not None


def test_a_layer_that_does_more_than_its_class_is_not_tiled() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 4

    assert why_not(nn.Linear(4, 4), "weight") is None
    assert why_not(Scaled(4, 4), "weight") == "a Scaled has a forward of its own"
    assert why_not(nn.MultiheadAttention(4, 2).out_proj, "weight") == "a MultiheadAttention computes with it"
    assert why_not(nn.Embedding(4, 4, max_norm=1.0), "weight") == "the Embedding has max_norm"
    assert why_not(nn.Conv1d(4, 4, 1), "weight") == "a Conv1d has a forward of its own"


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_chunked_loss_equals_torchs_and_never_has_the_logits(is_tiled: bool, reduction: Any) -> None:
    torch.manual_seed(1)
    tokens, features, vocabulary = 60, 8, 500
    heads = [nn.Linear(features, vocabulary) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    weights = tiled(heads[1], 64) if is_tiled else []
    hidden = [torch.randn(2, tokens // 2, features).requires_grad_() for _ in range(2)]
    hidden[1].data = hidden[0].data
    labels = torch.randint(0, vocabulary, (2, tokens // 2))
    labels[0, :7] = -100

    expected = functional.cross_entropy(heads[0](hidden[0]).flatten(0, 1), labels.flatten(), reduction=reduction)
    expected.backward()
    with Largest() as largest:
        loss = chunked_cross_entropy(hidden[1], heads[1], labels, tokens=4, reduction=reduction)
        loss.backward()

    # Both the weight and the logits of four tokens have fewer elements than a seventh of all logits.
    assert largest.numel <= vocabulary * features < tokens * vocabulary / 7
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(hidden[1].grad, hidden[0].grad, **CLOSE)
    of_weight = gradient_of(weights) if is_tiled else heads[1].weight.grad
    torch.testing.assert_close(of_weight, heads[0].weight.grad, **CLOSE)
    torch.testing.assert_close(heads[1].bias.grad, heads[0].bias.grad, **CLOSE)


def test_a_chunked_loss_has_torchs_gradients_where_all_rows_of_a_tile_are_padding() -> None:
    torch.manual_seed(1)
    heads = [nn.Linear(8, 32) for _ in range(2)]
    heads[0].bias.data[16:] = -torch.inf
    heads[1].load_state_dict(heads[0].state_dict())
    weights = tiled(heads[1], 16)
    hidden = [torch.randn(6, 8).requires_grad_() for _ in range(2)]
    hidden[1].data = hidden[0].data
    labels = torch.randint(0, 16, (6,))

    expected = functional.cross_entropy(heads[0](hidden[0]), labels)
    loss = chunked_cross_entropy(hidden[1], heads[1], labels, tokens=4)
    for each in (expected, loss):
        each.backward()

    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(hidden[1].grad, hidden[0].grad, **CLOSE)
    torch.testing.assert_close(gradient_of(weights), heads[0].weight.grad, **CLOSE)
    torch.testing.assert_close(heads[1].bias.grad, heads[0].bias.grad, **CLOSE)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_second_backward_through_a_chunked_loss_is_refused(is_tiled: bool) -> None:
    torch.manual_seed(1)
    head, hidden = nn.Linear(4, 32), torch.randn(3, 4, requires_grad=True)
    if is_tiled:
        tiled(head, 16)
    labels = torch.tensor([1, 20, 3])
    loss = chunked_cross_entropy(hidden, head, labels, tokens=2)
    (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (expected,) = torch.autograd.grad(functional.cross_entropy(head(hidden), labels), hidden)

    torch.testing.assert_close(first.detach(), expected, **CLOSE)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def test_a_chunked_loss_refuses_what_does_not_fit() -> None:
    head, hidden = nn.Linear(4, 10), torch.zeros(3, 4)

    with pytest.raises(IndexError, match="the head has 10 rows"):
        chunked_cross_entropy(hidden, head, torch.tensor([1, 10, 2]))
    with pytest.raises(ValueError, match="one label for each token"):
        chunked_cross_entropy(hidden, head, torch.tensor([1, 2]))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config).train()


@pytest.mark.parametrize("arguments", [{}, {"num_items_in_batch": 7}])
def test_a_causal_model_of_transformers_trains_with_the_chunked_loss(arguments: dict[str, Any]) -> None:
    plain, chunked = gpt2(), gpt2()
    loss = CausalLoss(chunked, tokens=5)
    tokens = torch.randint(0, 50, (2, 16))
    outputs = [model(input_ids=tokens, labels=tokens, **arguments) for model in (plain, chunked)]
    for output in outputs:
        output.loss.backward()

    assert outputs[1].logits.shape == (2, 16, 0)
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, **CLOSE)
    for parameter, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, **CLOSE)

    # Without labels, in evaluation, and in a copy, the logits are there.
    assert torch.equal(chunked(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert chunked.eval()(input_ids=tokens, labels=tokens).logits.shape == (2, 16, 50)
    chunked.train()
    copied = copy.deepcopy(chunked)(input_ids=tokens, labels=tokens, **arguments)
    assert copied.logits.shape == (2, 16, 50) and torch.equal(copied.loss, outputs[0].loss)
    loss.remove()
    assert torch.equal(chunked(input_ids=tokens, labels=tokens).loss, outputs[0].loss) or arguments


# PEFT asks for it under its former name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_causal_model_within_wrappers_is_found_and_its_head_has_no_adapter() -> None:
    shape = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=8)
    wrapped = peft.get_peft_model(
        GPT2LMHeadModel(shape), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    )
    loss = CausalLoss(wrapped, tokens=4)
    loss.remove()
    shape.tie_word_embeddings = False
    adapted = peft.get_peft_model(GPT2LMHeadModel(shape), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="such as those of an adapter"):
        chunked_cross_entropy(torch.randn(3, 16), adapted.get_output_embeddings(), torch.zeros(3, dtype=torch.long))


def test_a_model_that_changes_its_logits_before_the_loss_is_refused() -> None:
    class Capped(GPT2LMHeadModel):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = self.lm_head(self.transformer(input_ids)[0]) / 2
            return self.loss_function(logits, labels, vocab_size=50)

    model = Capped(gpt2().config).train()
    CausalLoss(model, tokens=5)
    tokens = torch.randint(0, 50, (2, 16))

    with pytest.raises(ConfigError, match="changes the logits between its head and its loss"):
        model(input_ids=tokens, labels=tokens)
    with pytest.raises(ConfigError, match="this model has 0"):
        CausalLoss(nn.Linear(4, 4), tokens=5)


def test_a_model_with_a_loss_of_its_own_is_told_so_by_the_error_that_this_causes() -> None:
    """T5 says that its loss is that of a causal model, and computes another one."""
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    loss = CausalLoss(model, tokens=4)
    tokens = torch.randint(0, 64, (2, 5))
    with pytest.raises((IndexError, RuntimeError, ValueError)) as raised:
        model(input_ids=tokens, labels=tokens)
    assert any("T5ForConditionalGeneration computes its loss without" in note for note in raised.value.__notes__)
    model.eval()
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    loss.remove()
    assert model.train()(input_ids=tokens, labels=tokens).loss.isfinite()
