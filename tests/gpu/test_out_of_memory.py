"""A device without memory for a step: the error is torch's, nothing is lost, and the next smaller batch trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import trainer_client
from tests.device import lag
from tests.gpu.accelerator import NEEDS_ACCELERATOR, kind
from tests.integration.support.daemon import tiers
from tests.integration.support.training import Run, build_model, make_optimizer, micro_batches, store_config
from tests.integration.support.waiting import wait_until

pytestmark = NEEDS_ACCELERATOR

MIB = 1 << 20


@contextmanager
def all_but(nbytes: int) -> Iterator[None]:
    """Leave `nbytes` of the device's memory to the block."""
    if kind() == "lag":
        with lag.memory_limit(lag.memory_counters().allocated_bytes + nbytes):
            yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_that_runs_out_of_memory_costs_no_lease_and_no_step(tmp_path: Path) -> None:
    run = Run(device=kind(), config=store_config(tmp_path, "cpu"))
    model = build_model(run)
    optimizer, _ = make_optimizer(model, run)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=run.config)
    batch = next(micro_batches(1)).to(engine.device)
    with engine:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        large = batch.repeat(512, 1)
        with all_but(8 * MIB), pytest.raises(torch.OutOfMemoryError):
            engine.backward(engine(input_ids=large, labels=large).loss)
        engine.zero_grad()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        assert engine.global_steps == 2
        address = f"unix:{tmp_path}/paramserver.sock"
        wait_until(lambda: tiers(address)[0].quarantined_bytes == 0)
        assert all(weight.isfinite().all() for weight in engine.full_state_dict().values())
