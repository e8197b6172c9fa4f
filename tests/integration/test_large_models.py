"""Models that are built without memory train like models that are built with it, from recorded initial values,
functions and files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

import trainer_client
from tests.integration.support.large_model_ranks import build_large
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import VOCABULARY, micro_batches
from trainer_client import zero
from trainer_client.training.initial.deferred_init import replay


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=True,
        )
    )


def start(model: torch.nn.Module, address: str, job: str) -> trainer_client.Engine:
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    return trainer_client.initialize(model=model, optimizer=optimizer, config=config_of(address, job, "nvme"))[0]


def test_a_recorded_model_trains_and_resumes_as_one_with_memory(model_store: str, job: str) -> None:
    batches = list(micro_batches(3))
    with zero.Init(seed=3):
        model = build()
    plain = build()
    plain.load_state_dict({name: replay(t) for name, t in model.state_dict(keep_vars=True).items()})
    adamw = AdamW(plain.parameters(), lr=1e-2, fused=True)
    for batch in batches:
        plain(input_ids=batch, labels=batch).loss.backward()
        adamw.step()
        adamw.zero_grad()

    with start(model, model_store, job) as engine:
        for batch in batches[:2]:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
    # The model's parameters are in the store, and the engine computes its buffers.
    with torch.device("meta"):
        model = build()
    with start(model, model_store, job) as engine:
        engine.backward(engine(input_ids=batches[2], labels=batches[2]).loss)
        engine.step()
        weights = engine.full_state_dict()

    assert [name for name, tensor in plain.state_dict().items() if not torch.equal(weights[name], tensor)] == []


def test_two_ranks_make_and_read_one_model(model_store: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = {name: tensor.clone() for name, tensor in build_large().state_dict().items()}
    del state["lm_head.weight"]  # This weight is tied to the embedding, so the files do not contain it.
    files = {f"model-{number}-of-2.safetensors": list(state)[number::2] for number in range(2)}
    for file, names in files.items():
        save_file({name: state[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    run_ranks("tests.integration.support.large_model_ranks", 2, tmp_path, model_store)

    read = [int((tmp_path / f"read-{rank}").read_text()) for rank in range(2)]
    stored = sum(tensor.nbytes for tensor in state.values())
    # Besides the tensors, each process reads the files' headers, and the sources of modules that it imports meanwhile.
    assert stored <= sum(read) <= 1.2 * stored
    assert max(read) <= 0.7 * stored
