"""The keys of the config can be walked by their dotted names."""

from __future__ import annotations

from trainer_client.config.keys import all_paths, leaves, section_at, sections_in
from trainer_client.config.precision import Bf16Section
from trainer_client.config.training_config import TrainingConfig
from trainer_client.config.zero import OffloadParamSection
from trainer_client.optimizers.registry import OPTIMIZERS
from trainer_client.optimizers.sgd import SgdSection


def test_sections_are_found_within_a_type() -> None:
    assert sections_in(Bf16Section | None) == [Bf16Section]
    assert sections_in(int | None) == []


def test_leaves_are_the_keys_that_are_no_sections() -> None:
    paths = [path for path, _ in leaves(TrainingConfig)]

    assert "zero_optimization.offload_param.device" in paths
    assert "zero_optimization.offload_param" not in paths
    assert paths.count("optimizer.params.nesterov") == 1
    assert paths.count("optimizer.params.lr") == len(OPTIMIZERS)
    assert {"zero_optimization", "zero_optimization.offload_param"} <= set(all_paths(TrainingConfig))


def test_the_type_of_the_optimizer_chooses_its_section() -> None:
    raw = {"optimizer": {"type": "SGD", "params": {}}}

    assert section_at(TrainingConfig, raw, ("optimizer", "params")) is SgdSection
    assert section_at(TrainingConfig, {}, ("zero_optimization", "offload_param")) is OffloadParamSection
    assert section_at(TrainingConfig, {}, ("zero_optimization", "stage")) is None
    assert section_at(TrainingConfig, {}, ("unknown",)) is None
