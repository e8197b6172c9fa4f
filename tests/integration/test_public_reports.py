"""What users of DeepSpeed and of libraries over it have reported runs here as in plain PyTorch.

support/public_reports.py has the list with its sources.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import trainer_client
from tests.integration.support.contract_cases import Loop
from tests.integration.support.model_runs import config_of
from tests.integration.support.public_reports import REPORTS, Report
from trainer_client import Engine

# torch warns about a weight without elements that it initializes.
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
# The stages, with the home of what is not on the device.
STAGES = {"2": "cpu", "3": "nvme"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.case.__name__)
def test_what_users_have_reported_runs_as_in_plain_pytorch(
    model_store: str, job: str, report: Report, stage: str
) -> None:
    section: dict[str, Any] = {"stage": int(stage), "offload_optimizer": {"device": STAGES[stage]}}
    if stage == "3":
        section["offload_param"] = {"device": STAGES[stage]}
    config = config_of(model_store, re.sub(r"\W+", "-", job)) | {"zero_optimization": section, "gradient_clipping": 0}

    def begin(model: nn.Module, optimizer: AdamW) -> Engine:
        return trainer_client.initialize(model=model, optimizer=optimizer, config=config)[0]

    ours, plain = Loop(begin), Loop(None)
    wanted = [torch.as_tensor(value).clone() for value in report.case(plain)]
    try:
        found = [torch.as_tensor(value).clone() for value in report.case(ours)]
        weights = ours.weights()
    finally:
        if ours.engine is not None:
            ours.engine.close_without_commit()
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted), report
    assert [name for name, value in plain.weights().items() if not torch.equal(value, weights[name])] == []
