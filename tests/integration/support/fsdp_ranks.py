"""One of two ranks that load an exported DCP checkpoint into FSDP2, and save another one; run by test_export.py.

The arguments are the checkpoint's directory, the file for what rank 0 gathers from the ranks, and the directory of the
checkpoint that they save after a step.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from tests.integration.support.training import Run, build_model, make_optimizer, micro_batches


def main() -> None:
    checkpoint, result, saved = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = build_model(Run())
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer, _ = make_optimizer(model, Run())
    weights, states = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": states}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # The counts of updates are not copied by `get_state_dict`, and the step below changes them.
    loaded = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    # The run goes on from there: a step of FSDP2 finds everything that it needs.
    (batch,) = micro_batches(1, dist.get_rank(), dist.get_world_size())
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": states}, checkpoint_id=saved)
    trained = get_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        torch.save({"model": loaded[0], "optimizer": loaded[1], "trained": trained[0], "states": trained[1]}, result)
    dist.destroy_process_group()
