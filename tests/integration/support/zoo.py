"""Small models of many kinds: some of transformers, and hand-made ones that are each hard to gather in one way.

All take `input_ids` and `labels` [MICRO_BATCH, LENGTH], and return an object with a `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 257
LENGTH = 32
WIDTH = 24


@dataclass(frozen=True, slots=True)
class Output:
    loss: torch.Tensor


class Language(nn.Module):
    """A language model with tied embedding and head. Subclasses define the layers between them in `hidden`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.calls = 0

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        self.calls += self.training
        hidden = self.hidden(self.embedding(input_ids))
        logits = nn.functional.linear(hidden, self.embedding.weight)
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Reused(Language):
    """A model with one block that has two names, and that is called several times or skipped, depending on the step."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.blocks = nn.ModuleList([shared, Block(), shared])

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        order = [0, 1, 2, 0] if self.calls % 2 else [0, 0]
        for index in order:
            hidden = self.blocks[index](hidden)
        return hidden


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.rotation = nn.Parameter(torch.eye(WIDTH))

    def forward(self) -> tuple[nn.Parameter, torch.Tensor]:
        return self.scale, self.rotation.t()


class Borrower(Block):
    """A block that uses weights of modules outside of it."""

    def __init__(self) -> None:
        super().__init__()
        # This is a plain list, so that the modules in it are not children of the block.
        self.others: list[nn.Linear] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        for other in self.others:
            hidden = hidden + nn.functional.linear(hidden, other.weight) / 4
        return hidden


class External(Language):
    """A model whose blocks use weights of earlier and later blocks and of the root, and whose root uses theirs."""

    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.givers = nn.ModuleList([ReturnsItsWeight(), ReturnsItsWeight()])
        self.blocks = nn.ModuleList([Borrower() for _ in range(4)])
        self.squares = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
        self.blocks[1].others.append(self.squares[0])
        self.blocks[2].others.append(self.mix)
        self.blocks[3].others.extend(self.squares)
        self.checkpointing = checkpointing

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        scale, rotation = self.givers[0]()
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointing else block(hidden)
        hidden = self.squares[1](hidden * scale) @ rotation
        return hidden + self.blocks[0].norm.weight * self.givers[1]()[0]


class Odd(Language):
    """A model with tiny parameters, which have no elements, no dimensions or odd sizes, and with empty units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock(size) for size in (1, 3, 17)])
        self.nothing = nn.ModuleList([EmptyBlock(), EmptyBlock()])

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.nothing):
            hidden = block(hidden)
        return hidden


class OddBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.some = nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.gain + self.some.sum() + self.none.sum()


class EmptyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.none.sum()


class Opaque:
    """A holder of a tensor that is neither a pytree nor a dataclass."""

    def __init__(self, value: torch.Tensor | None) -> None:
        self.value = value


class OutputBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *, state: Mapping[str, Any], sink: Opaque) -> Any:  # type: ignore[override]
        hidden = super().forward(state["hidden"][0])
        if self.kind == "none":
            sink.value = hidden
            return None
        if self.kind == "dataclass":
            return Output(hidden)
        if self.kind == "opaque":
            return Opaque(hidden)
        if self.kind == "dict":
            return {"hidden": (hidden, None, 3, "text")}
        return hidden, None, True


class Outputs(Language):
    """A model with blocks that take nested keyword arguments and return tuples, dicts, dataclasses, objects or None."""

    kinds = ("tuple", "dict", "dataclass", "opaque", "none", "tuple")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OutputBlock(kind) for kind in self.kinds])

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            sink = Opaque(None)
            output = block(state={"hidden": (hidden, None)}, sink=sink)
            if isinstance(output, Output):
                hidden = output.loss
            elif isinstance(output, dict):
                hidden = output["hidden"][0]
            elif isinstance(output, tuple):
                hidden = output[0]
            else:
                found = output.value if output is not None else sink.value
                assert found is not None
                hidden = found
        return hidden


class PartlyTrained(Language):
    """A model with frozen blocks at the beginning and in the middle, blocks under no_grad, and unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks = nn.ModuleList([Block() for _ in range(7)])
        for index in (0, 1, 3):
            self.blocks[index].requires_grad_(False)
        self.blocks[4].unused = nn.Parameter(torch.ones(5))

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:5]:
            hidden = block(hidden)
        # As in a teacher model, block 5 gets no gradient at all. Block 4 is trained by its use above.
        with torch.no_grad():
            target = self.blocks[5](self.blocks[4](hidden))
        return hidden + target


class Checkpointed(Language):
    """A model that recomputes single blocks, two blocks at once, and nested ones."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        # The mode of recomputation; None if nothing is recomputed.
        self.reentrant = reentrant

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self._recomputed(self.blocks[0], hidden)
        hidden = self._recomputed(self._two, hidden)
        return self._recomputed(self._nested, hidden)

    def _recomputed(self, function: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return function(hidden)
        recomputed: torch.Tensor = checkpoint(function, hidden, use_reentrant=self.reentrant)
        return recomputed

    def _two(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](hidden))

    def _nested(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._recomputed(self.blocks[5], self._recomputed(self._inner, hidden))

    def _inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.blocks[4](self._recomputed(self.blocks[3], hidden))


class Experts(Language):
    """A model with experts that are units. Each step uses other ones in another order, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(6)])
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.register_buffer("seen", torch.zeros(()))

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for index in self.chosen(hidden):
            hidden = self.experts[index](hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def chosen(self, hidden: torch.Tensor) -> list[int]:
        return [(5 * self.calls) % 6, (self.calls + 3) % 6]


class DivergentExperts(Experts):
    """Experts that each rank chooses by its own data: other ones, another number of them, in another order."""

    def chosen(self, hidden: torch.Tensor) -> list[int]:
        digits = [int(value * 1e4) for value in hidden.detach().abs().flatten(1).mean(1)]
        return [digits[0] % 6, digits[1] % 6, 0][: 1 + digits[0] % 3]


class Normed(Language):
    """A model with buffers that change in each forward, and with one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NormedBlock() for _ in range(2)])

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.ones(1), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(hidden.transpose(1, 2)).transpose(1, 2)) + self.offset


class Pixels(nn.Module):
    """A vision transformer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = transformers.ViTForImageClassification(
            transformers.ViTConfig(**SIZES, intermediate_size=48, image_size=8, patch_size=4)
        )

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        values = input_ids / VOCABULARY
        pixels = torch.cat((values, values), dim=1).view(-1, 1, 8, 8).expand(-1, 3, 8, 8)
        return self.vit(pixel_values=pixels, labels=labels[:, 0] % 2)


SIZES: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
DECODER: Mapping[str, Any] = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def gpt2(**changes: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **changes},
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        eos_token_id=None,
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def lora() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model: nn.Module = peft.get_peft_model(gpt2(), config)
    return model


def recomputed_lora() -> nn.Module:
    model = lora()
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": True})
    return model


def compiled() -> nn.Module:
    model = gpt2()
    for block in model.transformer.h:
        block.compile(backend="aot_eager")
    return model


ZOO: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2-zoo": gpt2,
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    ),
    "t5": t5,
    "bert": bert,
    "vit": Pixels,
    "lora": lora,
    "recomputed-lora": recomputed_lora,
    "reused": Reused,
    "external": External,
    "external-recomputed": lambda: External(checkpointing=True),
    "odd": Odd,
    "outputs": Outputs,
    "partly-trained": PartlyTrained,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed-reentrant": lambda: Checkpointed(reentrant=True),
    "unchecked": lambda: Checkpointed(reentrant=None),
    "experts": Experts,
    "divergent-experts": DivergentExperts,
    "normed": Normed,
    "compiled": compiled,
}
