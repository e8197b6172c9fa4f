"""States that move into host memory leave the memory of a CUDA device. Skipped on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trainer_client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_devices_memory_falls_and_rises(tmp_path: Path, stage: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0,
        "paramserver": {"state_dir": str(tmp_path / "state"), "host_budget": "256MiB"},
    }
    engine, *_ = trainer_client.initialize(model=model, config=config)
    with engine:
        inputs = torch.randn(2, 1024, device=engine.device)
        for _ in range(2):
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
        weights = engine.full_state_dict()
        # Until then the device has the parameters once more, for the commit to copy them from.
        engine.wait_for_commit()
        before = torch.cuda.memory_allocated()
        engine.offload_states()
        moved = before - torch.cuda.memory_allocated()
        # Two moments and the master weight in fp32, and the parameters in bf16.
        assert moved >= sum(parameter.numel() for parameter in model.parameters()) * 14
        engine.reload_states()
        assert torch.cuda.memory_allocated() == before
        found = engine.full_state_dict()
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []
