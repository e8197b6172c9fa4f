"""Trains a small byte-level GPT-2 on the source files of Python's standard library, with its state in the store.

This is an ordinary training script; only `trainer_client.initialize` and the config refer to the store. Start it again
after a crash, and it resumes from the last committed step:

    torchrun --standalone --nproc-per-node=2 examples/train_gpt2.py --steps 200

Without an address (in the config, or $PARAMSERVER_ADDRESS) it starts its own store daemon.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel

import trainer_client
from trainer_client import Engine

VOCABULARY = 256  # Each token is a byte.
CONTEXT = 128
SEED = 1
WARM_UP_STEPS = 20
CORPUS_BYTES = 16 << 20
PROMPT = b"def "
GENERATED_BYTES = 120


class Corpus:
    """Windows of CONTEXT bytes in a fixed random order, so that the cursor alone determines the next batch.

    The text is the installed standard library, read in sorted order. So it is the same on every rank and at each start.
    """

    def __init__(self) -> None:
        library = Path(os.__file__).parent
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
        files = [p for p in sorted(library.rglob("*.py")) if skipped.isdisjoint(p.relative_to(library).parts)]
        text = b"".join(path.read_bytes() for path in files)[:CORPUS_BYTES]
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._order = list(range(len(text) // CONTEXT))
        random.Random(SEED).shuffle(self._order)

    def batch(self, cursor: int, size: int) -> torch.Tensor:
        """Return `size` windows from number `cursor` on, [size, CONTEXT] in int64; the corpus repeats without end."""
        windows = [self._order[(cursor + i) % len(self._order)] for i in range(size)]
        return torch.stack([self._bytes[w * CONTEXT : (w + 1) * CONTEXT] for w in windows]).long()

    def byte_entropy(self) -> float:
        """Return the entropy of the byte frequencies in nats.

        This is the loss of a model that knows how frequent each byte is and nothing about its neighbours.
        """
        share = torch.bincount(self._bytes.long(), minlength=VOCABULARY) / len(self._bytes)
        return float(torch.special.entr(share).sum())


def read_config(path: Path) -> dict[str, Any]:
    """Return the config, with fp32 in place of bf16 on a processor without bf16 instructions.

    There, bf16 would take a hundred times as long.
    """
    config: dict[str, Any] = json.loads(path.read_text())
    if not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2":
        config["bf16"] = {"enabled": False}
    return config


def build_model() -> GPT2LMHeadModel:
    """Return a GPT-2 of about 10 million parameters.

    Dropout is on, so a resume is exact only if the random states are restored.
    """
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=384,
        n_layer=6,
        n_head=6,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return GPT2LMHeadModel(config)


def schedule(total_steps: int) -> Callable[[Optimizer], LambdaLR]:
    """Return a factory of a learning-rate schedule: a linear warm-up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        done = min(1.0, (step - WARM_UP_STEPS) / max(1, total_steps - WARM_UP_STEPS))
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return lambda optimizer: LambdaLR(optimizer, factor)


class JournalFile:
    """A file with what this rank did, one JSON object a line. Each line is written at once, so it survives a kill."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._file = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / f"rank-{rank}.jsonl").open("a", buffering=1)

    def write(self, event: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **values}) + "\n")


def train(engine: Engine, corpus: Corpus, journal: JournalFile, steps: int, digest_every: int) -> None:
    """Train up to step `steps` of the job. Record the weights every `digest_every` steps, or never if it is 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro = engine.train_micro_batch_size_per_gpu()
    engine.train()
    while engine.global_steps < steps:
        cursor = engine.client_state.get("cursor", 0)
        tokens = corpus.batch(cursor + rank * micro, micro).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        value = loss.item()
        journal.write(
            "loss",
            step=engine.global_steps + 1,
            loss=value,
            exact=value.hex(),
            tokens=tokens.numel() * world_size,
            at=time.time(),
        )
        engine.backward(loss)
        # The cursor is committed with the step, so a resumed run continues with the data after this step.
        engine.client_state["cursor"] = cursor + micro * world_size
        engine.step()
        if rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps}: loss {value:.3f}", flush=True)
        if digest_every and engine.global_steps % digest_every == 0:
            record_weights(engine, journal)


def record_weights(engine: Engine, journal: JournalFile) -> None:
    """Record a digest of the whole model's fp32 weights. Every rank must call this, because it is a collective."""
    weights = engine.full_state_dict(rank0_only=True)
    if weights:
        journal.write("weights", step=engine.global_steps, sha256=digest(weights))


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the names and bytes of all weights."""
    sha = hashlib.sha256()
    for name, tensor in weights.items():
        sha.update(name.encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def generate(engine: Engine, model: GPT2LMHeadModel) -> str:
    """Return text that the model writes after PROMPT.

    Every rank must call this, because the forwards are collectives. All ranks draw the same random numbers.
    """
    engine.eval()
    torch.manual_seed(SEED)
    prompt = torch.tensor([list(PROMPT)], device=engine.device)
    tokens = model.generate(  # type: ignore[misc]  # transformers' annotation of `self` excludes its own models
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=GENERATED_BYTES,
        do_sample=True,
        temperature=0.8,
        top_k=40,
    )
    return bytes(tokens[0].tolist()).decode(errors="replace")


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="train up to this step of the job (default: 200)")
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(__file__).with_name("train_gpt2.json"),
        help="DeepSpeed's config and the section `paramserver` (default: train_gpt2.json beside this script)",
    )
    parser.add_argument("--journal", type=Path, help="directory for a record of what each rank did, as JSON lines")
    parser.add_argument(
        "--digest-every",
        type=int,
        default=0,
        help="record a digest of all weights every so many steps (default: 0, only at the start)",
    )
    return parser.parse_args()


def main() -> None:
    """Build the model and its engine, train, and write a text."""
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun: torchrun --standalone --nproc-per-node=2 examples/train_gpt2.py")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    corpus = Corpus()
    torch.manual_seed(SEED)
    model = build_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = read_config(arguments.config)
    engine, *_ = trainer_client.initialize(model=model, config=config, lr_scheduler=schedule(arguments.steps))
    with engine:
        journal = JournalFile(arguments.journal, dist.get_rank())
        if engine.resumed_step == 0:
            torch.manual_seed(SEED + dist.get_rank())  # Each rank has other dropout masks.
        journal.write(
            "start",
            pid=os.getpid(),
            resumed_step=engine.resumed_step,
            parameters=parameters,
            byte_entropy=corpus.byte_entropy(),
            device=str(engine.device),
            data_plane=engine.data_plane,
        )
        record_weights(engine, journal)
        train(engine, corpus, journal, arguments.steps, arguments.digest_every)
        journal.write("end", text=generate(engine, model))


if __name__ == "__main__":
    main()
