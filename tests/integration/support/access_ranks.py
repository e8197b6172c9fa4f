"""One of two ranks that read and change states; run by test_access.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import trainer_client
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import Run, build_model, micro_batches
from trainer_client import utils, zero
from trainer_client.runtime.zero.utils import is_zero_param

WEIGHT = "transformer.h.1.mlp.c_fc.weight"
EMBEDDING = "transformer.wte.weight"


def updated(engine: trainer_client.Engine, weight: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return what torch's optimizer makes of a value with the engine's gradient and moments, in the second step."""
    plain = nn.Parameter(value)
    optimizer = AdamW([plain], lr=1e-2, fused=True)
    plain.grad = utils.safe_get_full_grad(weight)
    moments = {kind: utils.safe_get_full_optimizer_state(weight, kind) for kind in ("exp_avg", "exp_avg_sq")}
    optimizer.state[plain] = {"step": torch.tensor(1.0), **moments}
    optimizer.step()
    return plain.detach()


def check_parts(weight: nn.Parameter, rank: int) -> None:
    """Check that each rank sets its own part of a state."""
    local = utils.safe_get_local_optimizer_state(weight, "exp_avg")
    assert local is not None
    utils.safe_set_local_optimizer_state(weight, torch.full_like(local, rank + 1), "exp_avg")
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment is not None
    assert set(moment.unique().tolist()) <= {1.0, 2.0}
    assert int((moment == rank + 1).sum()) == local.numel()
    if is_zero_param(weight):
        # This is how DeepSpeed's documentation makes a part, and the shape of the whole.
        shown: Any = weight
        assert shown.ds_tensor.shape == local.shape and shown.ds_shape == moment.shape
        utils.safe_set_local_optimizer_state(weight, torch.zeros(shown.ds_tensor.shape), "exp_avg")
        cleared = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert cleared is not None and not cleared.any()


def check(config: dict[str, Any]) -> None:
    rank = dist.get_rank()
    model = build_model(Run())
    engine, *_ = trainer_client.initialize(
        model=model, optimizer=AdamW(model.parameters(), lr=1e-2, fused=True), config=config
    )
    plain = build_model(Run())
    ddp = DistributedDataParallel(plain)
    with engine:
        (batch,) = micro_batches(1, rank, 2)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        ddp(input_ids=batch, labels=batch).loss.backward()
        weight = model.get_parameter(WEIGHT)
        gradient = utils.safe_get_full_grad(weight)
        torch.testing.assert_close(gradient, plain.get_parameter(WEIGHT).grad, rtol=1e-4, atol=1e-6)
        engine.step()

        # For every state, the ranks' shards together are the whole tensor, and each shard has its offset.
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            parts: list[Any] = [None, None]
            dist.all_gather_object(parts, engine.sharded_state_dict(kind))
            for name in (WEIGHT, EMBEDDING, "lm_head.weight", "transformer.h.2.ln_1.bias"):
                whole = engine.get_full(name, kind)
                assert whole is not None
                for part in parts:
                    shard = part[name]
                    assert shard.shape == whole.shape
                    end = shard.offset + shard.values.numel()
                    assert torch.equal(whole.flatten()[shard.offset : end], shard.values)
                assert sum(part[name].values.numel() for part in parts) == whole.numel()

        # After the block, all ranks have the changes of `modifier_rank`.
        with zero.GatheredParameters(model.get_submodule("transformer.h.1").parameters(), modifier_rank=1):
            before = weight.detach().clone()
            if rank == 1:
                with torch.no_grad():
                    weight[7] = 0.125
        before[7] = 0.125
        changed = utils.safe_get_full_fp32_param(weight)
        assert changed is not None
        assert torch.equal(changed, before)

        check_parts(weight, rank)

        # Training goes on with the changed values, also with those that were set after the backward pass, and both
        # ranks get the same weights.
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
        expected = updated(engine, weight, torch.full(weight.shape, 0.25))
        engine.step()
        mine = engine.full_state_dict()[WEIGHT]
        assert torch.equal(mine, expected)
        other = mine.clone()
        dist.broadcast(other, src=0)
        assert torch.equal(mine, other)


def check_gradients_that_are_given(config: dict[str, Any]) -> None:
    """Check that a parameter which no backward pass reaches can be given a gradient, on any number of ranks.

    The second block is used in the first forward, and the third one is not.
    """
    model = build_model(Run(model="conditional"))
    plain = nn.Parameter(model.get_parameter("blocks.1.never_used").detach().clone())
    optimizer = AdamW([plain], lr=1e-2, fused=True)
    plain.grad = torch.linspace(-1, 1, 5)
    optimizer.step()
    engine, *_ = trainer_client.initialize(
        model=model, optimizer=AdamW(model.parameters(), lr=1e-2, fused=True), config=config
    )
    with engine:
        (batch,) = micro_batches(1)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        assert engine.get_full("blocks.1.never_used", "grad") is None
        engine.set_full("blocks.1.never_used", "grad", torch.linspace(-1, 1, 5))
        given = engine.get_full("blocks.1.never_used", "grad")
        assert given is not None and torch.equal(given, torch.linspace(-1, 1, 5))
        for name, why in (("blocks.2.never_used", "has no gradient"), ("blocks.1.shared.weight", "is frozen")):
            try:
                engine.set_full(name, "grad", torch.ones(model.get_parameter(name).shape))
            except RuntimeError as error:
                assert f"{name} {why}" in str(error), error
            else:
                raise AssertionError(f"{name}: not refused")
        engine.step()
        weights = engine.full_state_dict()
        assert torch.equal(weights["blocks.1.never_used"], plain.detach())
        assert torch.equal(weights["blocks.2.never_used"], torch.ones(5))


def main() -> None:
    address = sys.argv[1]
    dist.init_process_group("gloo")
    check(config_of(address, "access-all-gathers", "nvme", gather="collective"))
    check(config_of(address, "access-one-sided", "nvme", gather="store"))
    resident = config_of(address, "access-resident", "nvme") | {"zero_optimization": {"stage": 1}}
    check(resident)
    check_gradients_that_are_given(config_of(address, "access-given", "nvme"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
