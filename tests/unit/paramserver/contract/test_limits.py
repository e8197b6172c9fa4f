"""The limits that storage defines for itself, because it may not import the contract, equal those of the contract."""

from __future__ import annotations

from pathlib import Path

from paramserver.contract import limits
from paramserver.contract.buffer_names import has_buffers, name_buffers
from storage.base.config import EngineConfig
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import BUFFERS_BEGIN, ELEMENT_ALIGNMENT
from storage.memory.gathering import GATHER_ALIGNMENT


def test_storage_and_contract_agree() -> None:
    config = EngineConfig(state_dir=Path(), host_budget_bytes=0, nvme_budget_bytes=0)
    assert limits.ELEMENT_ALIGNMENT == ELEMENT_ALIGNMENT
    assert limits.GATHER_ALIGNMENT_BYTES == GATHER_ALIGNMENT
    assert limits.READ_BLOCK_BYTES == BLOCK_BYTES
    assert has_buffers(name_buffers(12)) and name_buffers(12).startswith(BUFFERS_BEGIN) and has_buffers(BUFFERS_BEGIN)
    assert config.units_of_a_rank_alone == limits.UNITS_MAPPED_AT_ONCE
    assert config.gradients_of_a_rank == limits.GRADIENTS_AT_ONCE
