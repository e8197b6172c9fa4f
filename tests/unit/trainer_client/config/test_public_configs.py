"""DeepSpeed configs of public projects are accepted, and those that are refused are known with their reasons."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_client.config.keys import all_paths
from trainer_client.config.loading import load_config
from trainer_client.config.older_names import OLDER_NAMES
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError

DATA = Path(__file__).parents[3] / "data"
# Each has the repository, the path and the commit in "source". "outside" lists what the config uses beside ZeRO, number
# formats, optimizers and schedules.
CONFIGS: list[dict[str, Any]] = json.loads((DATA / "deepspeed_configs.json").read_text(encoding="utf-8"))
# The refused ones by source, with the keys that are in the way.
REFUSED: dict[str, list[str]] = json.loads((DATA / "deepspeed_configs_refused.json").read_text(encoding="utf-8"))
# The dotted names of the keys that the code of DeepSpeed 0.19.6 reads.
DEEPSPEED_KEYS = (DATA / "deepspeed_keys.txt").read_text(encoding="utf-8").split()


def problems(config: dict[str, Any]) -> list[str]:
    """Return the keys for which a config is refused, with their values."""
    try:
        load_config(config, {})
    except ConfigError as error:
        return [line.partition(": ")[0].partition("; ")[0] for line in str(error).splitlines()]
    return []


def known_keys() -> Iterator[str]:
    """Yield the dotted names of all keys and sections of the config, older names included."""
    yield from all_paths(TrainingConfig)
    yield from (older.path for older in OLDER_NAMES)


def test_nearly_all_that_use_nothing_else_are_accepted() -> None:
    judged = [(entry["source"], problems(entry["config"])) for entry in CONFIGS if not entry["outside"]]
    refused = [found for _, found in judged if found]
    reasons = Counter(found[0] for found in refused)

    assert len(judged) >= 140
    assert len(refused) <= 0.05 * len(judged), reasons


def test_the_refused_ones_are_known_with_their_reasons() -> None:
    found = {entry["source"]: problems(entry["config"]) for entry in CONFIGS}

    assert {source: keys for source, keys in found.items() if keys} == REFUSED


def test_every_key_of_deepspeed_is_known() -> None:
    assert set(DEEPSPEED_KEYS) - set(known_keys()) == set()
