"""A process that computes forwards of one model in one of four ways, when its standard input asks for it.

Each line of the input is a JSON object, {"forwards": N} or {"generate": TOKENS}; the answer is one, too. The process
ends with its input. The ways: `plain` (the model in memory), `disk_offload` (Accelerate's), `disk_offload_uncached`
(the same with files that the kernel has not in memory when a forward begins), `store` (this project's).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from safetensors.torch import load_model
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_client import load_checkpoint_and_dispatch

DATA_SEED = 1


def config_of(spec: Mapping[str, Any]) -> GPT2Config:
    """Return the configuration of the model."""
    return GPT2Config(
        n_layer=spec["layers"],
        n_embd=spec["width"],
        n_head=spec["width"] // 64,
        vocab_size=spec["vocabulary"],
        n_positions=spec["positions"],
        bos_token_id=None,
        eos_token_id=None,
    )


def _model(spec: Mapping[str, Any], resources: ExitStack) -> Any:
    """Return the model, ready for a forward, as the way of the contestant has it."""
    dtype = getattr(torch, spec["dtype"])
    if spec["way"] == "store":
        with torch.device("meta"):
            empty = GPT2LMHeadModel(config_of(spec)).to(dtype)
        model: Any = load_checkpoint_and_dispatch(empty, spec["checkpoint"], paramserver={"address": spec["address"]})
        resources.callback(model.paramserver_engine.close)
        return model
    model = GPT2LMHeadModel(config_of(spec)).to(dtype)
    model.train(False)
    load_model(model, f"{spec['checkpoint']}/model.safetensors")
    if spec["way"].startswith("disk_offload"):
        offload_dir = Path(f"{spec['offload_dir']}-{spec['way']}")
        accelerate.disk_offload(model, str(offload_dir))
        if spec["way"] == "disk_offload_uncached":
            files = [os.open(path, os.O_RDONLY) for path in offload_dir.iterdir()]
            for file in files:
                os.fsync(file)
            model.register_forward_pre_hook(partial(_drop_from_page_cache, files), prepend=True)
    return model


def _drop_from_page_cache(files: Sequence[int], *_: object) -> None:
    """Have the kernel forget the pages of files.

    A page cache that is smaller than the files has none of the pages that a forward asks for, because forwards read all
    files in the same order, and the kernel drops those first that were used the longest time ago.
    """
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@torch.no_grad()
def main() -> None:
    """Build the model, and answer until the input ends."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    generator = torch.Generator().manual_seed(DATA_SEED)
    tokens = torch.randint(0, spec["vocabulary"], (1, spec["tokens"]), generator=generator)
    with ExitStack() as resources:
        begun = time.perf_counter()
        model = _model(spec, resources)
        print(json.dumps({"ready": time.perf_counter() - begun}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            seconds = []
            for _ in range(order.get("forwards", 1)):
                begun = time.perf_counter()
                if "forwards" in order:
                    result = model(tokens, use_cache=False).logits
                else:
                    result = model.generate(
                        tokens, max_new_tokens=order["generate"], min_new_tokens=order["generate"], do_sample=False
                    )
                seconds.append(time.perf_counter() - begun)
            digest = hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            print(json.dumps({"seconds": seconds, "digest": digest}), flush=True)


if __name__ == "__main__":
    main()
