"""Each row of docs/torch-contract.md does what the page says, beside plain PyTorch."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import trainer_client
from tests.integration.support.contract_cases import CASES, Loop
from tests.integration.support.model_runs import config_of
from trainer_client import Engine
from trainer_client.errors import TrainerClientError

PAGE = (Path(__file__).parents[2] / "docs" / "torch-contract.md").read_text(encoding="utf-8")
# The stages, with the home of what is not on the device.
STAGES = {"0": (0, "none"), "2": (2, "cpu"), "3": (3, "cpu")}
# save_pretrained of transformers asks for an attribute that it has deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
COUNTS, REFUSED, WARNS = "counts", "refused", "warns"


def rows() -> dict[str, tuple[str, str]]:
    """Return what the page says of stages 0 to 2 and of stage 3, by the text of the first column."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[1] != "stages 0 to 2":
            found[cells[0]] = (cells[1].split(":")[0], cells[2].split(":")[0])
    return found


ROWS = rows()


def test_the_page_has_a_row_for_each_case_and_a_case_for_each_row() -> None:
    assert ROWS.keys() == CASES.keys()
    assert {word for words in ROWS.values() for word in words} <= {COUNTS, REFUSED, WARNS}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("text", ROWS)
def test_a_row_does_what_the_page_says(
    model_store: str, job: str, text: str, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    number, home = STAGES[stage]
    expected = ROWS[text][number == 3]
    section: dict[str, Any] = {"stage": number} | ({"offload_optimizer": {"device": home}} if number else {})
    if number == 3:
        section["offload_param"] = {"device": home}
    config = config_of(model_store, re.sub(r"\W+", "-", job)) | {"zero_optimization": section, "gradient_clipping": 0}

    def begin(model: nn.Module, optimizer: AdamW) -> Engine:
        return trainer_client.initialize(model=model, optimizer=optimizer, config=config)[0]

    ours = Loop(begin)
    if expected == REFUSED:
        # The message of an error of torch itself would not say what to write.
        with pytest.raises((TrainerClientError, RuntimeError), match=r"engine\.|initialize|remove|assign a tensor"):
            for _ in CASES[text](ours):
                pass
        if ours.engine is not None:
            ours.engine.close_without_commit()
        return
    plain = Loop(None)
    wanted = [torch.as_tensor(value).clone() for value in CASES[text](plain)]
    caplog.set_level(logging.WARNING)
    caplog.clear()
    found = [torch.as_tensor(value).clone() for value in CASES[text](ours)]
    weights = ours.weights()
    assert ours.engine is not None
    ours.engine.close()
    if expected == WARNS:
        assert "engine." in caplog.text
        return
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)
    assert [name for name, value in plain.weights().items() if not torch.equal(value, weights[name])] == []
