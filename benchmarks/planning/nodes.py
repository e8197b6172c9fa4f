"""The plans of three models of Llama's shape for nodes of GPUs, as the table of docs/plan.md has them.

Nothing is measured: the plans are made of published rates and of costs of the daemon that were measured on CPUs.

Run as a module from the root of the repository: `python -m benchmarks.planning.nodes`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import report
from paramserver.device_reads import find_hits
from paramserver.store_need import find_need
from trainer_client.plan.boundaries import OffloadRule
from trainer_client.plan.cli import DEFAULT_CONFIG
from trainer_client.plan.layout import World
from trainer_client.plan.machine import Overhead
from trainer_client.plan.model_inputs import make_batch
from trainer_client.plan.nodes import Node, find_node
from trainer_client.plan.plan import Job, Plan, plan, with_budgets
from trainer_client.plan.rehearsal import Rehearsal, rehearse

# The tokens of a sample, which is the micro-batch of a rank.
TOKENS = 4096
NODES = (1, 8, 128, 1250)
# The most threads that the daemon's key optimizer_threads allows.
OPTIMIZER_THREADS = 64


def _llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int, words: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=words,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


# The shapes of Llama 2 7B, Llama 3 70B and Llama 3.1 405B, whose blocks are computed again in the backward pass.
llama_7b = partial(_llama, 4096, 11008, 32, 32, 32, 32000)
llama_70b = partial(_llama, 8192, 28672, 80, 64, 8, 128256)
llama_405b = partial(_llama, 16384, 53248, 126, 128, 8, 128256)
MODELS = {"7 B": llama_7b, "70 B": llama_70b, "405 B": llama_405b}
SHOWN = ("compute", "nvme", "store_link", "host_memory", "store_processor", "collectives")


def jobs(build: Callable[[], nn.Module]) -> Iterator[tuple[str, Job]]:
    """Yield the job of a model on each node, with its name; one rehearsal serves them all."""
    with torch.device("meta"):
        model = build()

    @functools.cache
    def rehearsed(
        samples: int, dtype: torch.dtype | None, offload: OffloadRule | None, autocast_dtype: torch.dtype | None
    ) -> Rehearsal:
        return rehearse(build, lambda _: make_batch(model, None)(samples, TOKENS), dtype, offload, autocast_dtype)

    for name, nodes in (*(("h100x8", nodes) for nodes in NODES), ("h200x8", NODES[0])):
        yield name, _job(model, rehearsed, find_node(name), nodes)


def _job(
    model: nn.Module,
    rehearsed: Callable[[int, torch.dtype | None, OffloadRule | None, torch.dtype | None], Rehearsal],
    node: Node,
    nodes: int,
) -> Job:
    return Job(
        build=lambda: model,
        rehearse=rehearsed,
        compute_seconds=lambda rehearsal: rehearsal.flops / node.flops,
        overhead=Overhead(per_unit=0.0, per_step=0.0),
        world=World(ranks=node.gpus, nodes=nodes),
        capacities=node.capacities(),
        rates=node.rates(World(ranks=node.gpus, nodes=nodes)),
        rates_in=node.rates,
        find_need=find_need,
        find_hits=find_hits,
        sequence=TOKENS,
        device="cuda",
        store_has_cores=True,
        optimizer_threads=OPTIMIZER_THREADS,
        devices=node.devices,
    )


def row(model: str, name: str, found: Plan) -> Sequence[str]:
    """Return the cells of a plan in the table."""
    time, ranks = found.time, found.world.size
    seconds = time.resources
    network = seconds["collectives"] / seconds["compute"] * TOKENS
    missing = ", ".join(shortage.what for shortage in found.shortages)
    return (
        model,
        name,
        f"{ranks:,}",
        *(f"{seconds[key]:.2f}" for key in SHOWN),
        time.binding,
        f"{(time.hiding_tokens or 0) / ranks:,.0f}",
        f"{network:,.0f}",
        str(time.store_threads),
        missing or "-",
    )


def markdown() -> str:
    """Return the table."""
    header = ["model", "node", "ranks", *(name.replace("_", " ") for name in SHOWN), "binds"]
    header += ["I/O hidden from", "network hidden from", "optimizer threads", "lacks"]
    rows = []
    for model, build in MODELS.items():
        for name, job in jobs(build):
            rows.append(row(model, name, with_budgets(job, plan(job, DEFAULT_CONFIG))))
            print("|", " | ".join(rows[-1]), file=sys.stderr, flush=True)
    return report.table(header, [list(cells) for cells in rows])


if __name__ == "__main__":
    print(markdown())
