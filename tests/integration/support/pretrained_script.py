"""A script that loads and changes models of transformers at stage 3, as those do that tune a pretrained model.

`python -m trainer_client.as_deepspeed pretrained_script.py DIRECTORY RESULT.json` makes a small GPT-2, saves it, loads
it again while a stage-3 config is active, and trains it beside plain PyTorch. It writes a dict from the name of each
way to "values", which says whether the model has the values of the files, and "losses", two lists that should be equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

SHAPE = GPT2Config(
    n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=None, eos_token_id=None,
    attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
)  # fmt: skip
STEPS = 3


def config(state_dir: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "paramserver": {"state_dir": str(state_dir), "host_budget": "64MiB", "nvme_budget": "1GiB"},
    }


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def losses_of(model: Any, step: Callable[[torch.Tensor], None]) -> list[float]:
    losses = []
    for number in range(STEPS):
        tokens = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=tokens, labels=tokens).loss
        step(loss)
        losses.append(loss.item())
    return losses


def trained_plainly(state: dict[str, torch.Tensor], rows: int) -> list[float]:
    """Train a plain model with these values and this number of rows of its embedding."""
    shape = GPT2Config(**SHAPE.to_dict() | {"vocab_size": rows})
    model = GPT2LMHeadModel(shape)
    model.load_state_dict(state)
    optimizer = optimizer_of(model)

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return losses_of(model, step)


def trained_here(model: torch.nn.Module, state_dir: Path) -> list[float]:
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config(state_dir))

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    with engine:
        return losses_of(engine, step)


def resized(model: Any, **arguments: Any) -> torch.nn.Module:
    """Give a model rows for new tokens, as for a token that pads."""
    model.resize_token_embeddings(57, **arguments)
    assert model.config.vocab_size == model.get_output_embeddings().out_features == 57
    return model


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def main(directory: Path, result: Path) -> None:
    torch.manual_seed(0)
    made = GPT2LMHeadModel(SHAPE)
    expected = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made.save_pretrained(directory / "whole")
    made.save_pretrained(directory / "shards", max_shard_size="8KB")
    keep = HfDeepSpeedConfig(config(directory / "unused"))

    ways: dict[str, Callable[[], torch.nn.Module]] = {
        "one file": lambda: AutoModelForCausalLM.from_pretrained(directory / "whole"),
        "shards": lambda: AutoModelForCausalLM.from_pretrained(directory / "shards"),
        "a config": lambda: AutoModelForCausalLM.from_config(SHAPE),
        "resized": lambda: resized(AutoModelForCausalLM.from_pretrained(directory / "whole"), mean_resizing=False),
        "resized to the mean": lambda: resized(AutoModelForCausalLM.from_pretrained(directory / "whole")),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, make in ways.items():
        model = make()
        state = state_of(model)
        # The embedding and the head have new rows at their ends.
        values = name == "a config" or all(torch.equal(state[key][: len(old)], old) for key, old in expected.items())
        rows = state["transformer.wte.weight"].shape[0]
        found[name] = {
            "values": values,
            "losses": [trained_here(model, directory / f"state {name}"), trained_plainly(state, rows)],
        }
    assert keep is not None
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
